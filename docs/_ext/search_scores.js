// Which results come first: how-to pages, then tutorials, then names in the code. Long tables of results come near the end, and the
// changelog and contributing, which mention everything, at the very end.
// Sphinx puts this in front of its search; a hit in a heading counts 15, one in the text 5.
const _PAGES_FIRST = [
  [/^(measuring|optimizers|learning-rate|cheaper|distributed|integrations|watching|advice)$/, 12],
  [/^(tutorials\/|index$)/, 8],
  [/^(optimizer-trials|reproduction|reproduction-summary|scaling|survives|versions)$/, -12],
  [/^(changelog|contributing)$/, -20],
];

var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    if (kind === "object") return score;
    const found = _PAGES_FIRST.find(([pages]) => pages.test(page));
    return score + (found ? found[1] : 0);
  },
  // a name itself comes before pages that only mention it, and after pages with a heading about it
  objNameMatch: 14,
  objPartialMatch: 2,
  objPrio: { 0: 5, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
