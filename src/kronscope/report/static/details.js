// Views of the curves behind the cosines: exponents, batch sizes, spectra.

function stepColor(step, steps) {
  const part = steps.length > 1 ? (step - steps[0]) / (steps[steps.length - 1] - steps[0]) : 1;
  return `hsl(${Math.round(270 - 225 * part)} 65% 52%)`;
}

function drawExponents(view, sweeps) {
  const sorted = [...sweeps].sort((a, b) => a.step - b.step);
  const steps = sorted.map((sweep) => sweep.step);
  const looks = sorted.map((sweep) => ({ color: stepColor(sweep.step, steps), width: 1.6, marker: "o" }));
  const best = sorted.map((sweep) => {
    const { exponent, cosine } = sweep.values;
    const place = cosine.reduce(
      (found, value, i) => (isNumber(value) && (found < 0 || value > cosine[found]) ? i : found),
      -1,
    );
    return place < 0 ? { x: sweep.step, y: null } : { x: sweep.step, y: exponent[place], cosine: cosine[place] };
  });
  const what = where([conditionName(state.condition), state.layer]);
  const first = chartHolder(`Cosine of powers of L ⊗ R, ${what}`);
  const second = chartHolder(`Best exponent against step, ${what}`);
  fill(
    view,
    element(
      "div",
      { class: "pair" },
      element("div", {}, element("h3", {}, "Cosine of (L ⊗ R)ᵖ, one line per step"), first),
      steps.length > 1 ? element("div", {}, element("h3", {}, "The exponent that fits best"), second) : null,
    ),
  );
  const series = sorted.map((sweep, i) => ({
    name: `step ${whole(sweep.step)}`,
    look: looks[i],
    plain: true,
    points: sweep.values.exponent.map((x, k) => ({ x, y: sweep.values.cosine[k] })),
  }));
  best.forEach((point, i) => {
    if (isNumber(point.y))
      series.push({
        name: `best at step ${whole(point.x)}`,
        look: { ...looks[i], width: 2.4 },
        dots: true,
        silent: true,
        points: [{ x: point.y, y: point.cosine }],
      });
  });
  const ends = sorted.flatMap((sweep) => sweep.values.exponent);
  const marks = [
    { x: 0.5, name: "Shampoo" },
    { x: 1, name: "Shampoo²" },
  ].filter((mark) => mark.x >= Math.min(...ends) && mark.x <= Math.max(...ends));
  lineChart(first, {
    series,
    marks,
    label: first.getAttribute("aria-label"),
    xLabel: "exponent p",
    xTitle: (p) => `p = ${+p.toFixed(3)}`,
    tickText: (p) => String(+p.toFixed(3)),
    ticks: niceTicks(Math.min(...ends), Math.max(...ends), 5).ticks,
    limits: cosineLimits(
      sorted.flatMap((sweep) => sweep.values.cosine),
      state.fit,
    ),
  });
  if (steps.length > 1) {
    const values = best.map((point) => point.y).filter(isNumber);
    const pad = Math.max(0.1, 0.1 * (Math.max(...values, 1) - Math.min(...values, 0.5)));
    lineChart(second, {
      series: [
        {
          name: "best exponent",
          look: { color: "var(--accent)", width: 1.6, marker: "o" },
          points: best.map(({ x, y }) => ({ x, y })),
        },
      ],
      label: second.getAttribute("aria-label"),
      xLabel: "step",
      yLabel: "exponent p",
      xTitle: (step) => `Step ${whole(step)}`,
      limits: [Math.min(...values, 0.5) - pad, Math.max(...values, 1) + pad],
    });
  }
  const ramp =
    steps.length > 1
      ? [
          "Colour is the step: ",
          element("span", {}, swatch({ ...looks[0], marker: null })),
          ` ${whole(steps[0])} to `,
          element("span", {}, swatch({ ...looks[looks.length - 1], marker: null })),
          ` ${whole(steps[steps.length - 1])}. `,
        ]
      : [];
  return {
    caption: [
      `Cosine of (L ⊗ R)ᵖ with the true matrix: ${what}. Rings mark the best p; Shampoo is p = ½, Shampoo² is p = 1. `,
      ...ramp,
    ],
  };
}

function drawBatchSizes(view, sweeps) {
  const sweep = sweeps[0];
  const holder = chartHolder(`Cosine against batch size, ${state.layer}`);
  fill(view, holder);
  const sizes = sweep.values.batch_size;
  const names = NAMES.filter((name) => Array.isArray(sweep.values[name]));
  const shown = names.filter((name) => !state.hidden.has(name));
  lineChart(holder, {
    series: shown.map((name) => ({
      name: STYLES[name].name,
      look: STYLES[name],
      points: sizes.map((x, i) => ({ x, y: sweep.values[name][i] })),
    })),
    label: holder.getAttribute("aria-label"),
    log: true,
    xLabel: "batch size B (logarithmic)",
    xTitle: (size) => `B = ${whole(size)}`,
    tickText: (size) => whole(size),
    limits: cosineLimits(
      shown.flatMap((name) => sweep.values[name]),
      state.fit,
    ),
  });
  return {
    names,
    caption: `How the batch size the approximations are fitted with changes their cosine: ${where([conditionName(state.condition), state.layer, `step ${whole(state.step)}`])}.`,
  };
}

function drawSpectrum(view, spectra) {
  const spectrum = spectra[0];
  const all = DETAILS.spectrum
    .filter((item) => matches(item, ["run", "layer", "condition"]))
    .sort((a, b) => a.step - b.step);
  const first = chartHolder("One-round cosines against step");
  const second = chartHolder(`Leading singular values and traces at step ${state.step}`);
  fill(
    view,
    element(
      "div",
      { class: "pair" },
      all.length > 1
        ? element(
            "div",
            {},
            element("h3", {}, "σ₁ / ‖σ‖ and the first round from the identity"),
            first,
            drawKey(DATA.curves),
          )
        : null,
      element(
        "div",
        {},
        element("h3", {}, `Leading σᵢ and |αᵢ| at step ${whole(state.step)}, divided by the first`),
        second,
        drawKey(DATA.bars),
      ),
    ),
  );
  if (all.length > 1) {
    const series = Object.entries(DATA.curves).map(([key, look]) => ({
      name: look.name,
      look,
      points: all.map((item) => ({ x: item.step, y: item.values[key] })),
    }));
    lineChart(first, {
      series,
      label: first.getAttribute("aria-label"),
      xLabel: "step",
      xTitle: (step) => `Step ${whole(step)}`,
      limits: cosineLimits(
        series.flatMap((line) => line.points.map((point) => point.y)),
        state.fit,
      ),
    });
  }
  const leading = (key) =>
    (spectrum.values[key] || [])
      .slice(0, 16)
      .map((value, i, list) => ({ x: i + 1, y: isNumber(value) && list[0] ? Math.abs(value / list[0]) : null }));
  const bars = Object.entries(DATA.bars).map(([key, look]) => ({
    name: look.name,
    look,
    bars: key === "sigma",
    dots: key !== "sigma",
    points: leading(key),
  }));
  const top = Math.max(1, ...bars.flatMap((line) => line.points.map((point) => point.y)).filter(isNumber));
  lineChart(second, {
    series: bars,
    label: second.getAttribute("aria-label"),
    xLabel: "i",
    yLabel: "relative to the first",
    xTitle: (i) => `i = ${i}`,
    limits: [0, 1.05 * top],
    pad: 0.06,
  });
  const numbers = `σ₁/‖σ‖ = ${decimal(spectrum.values.ratio)}, L ${decimal(spectrum.values.left)}, R ${decimal(spectrum.values.right)} at this step.`;
  return {
    caption: `Why one round from the identity is enough: ${where([conditionName(state.condition), state.layer])}. ${numbers} The L and R curves stay near 1 as long as α₁ exceeds the other αᵢ.`,
  };
}

function drawKey(looks) {
  return element(
    "div",
    { class: "legend" },
    Object.values(looks).map((look) => element("span", { class: "key" }, swatch(look), look.name)),
  );
}
