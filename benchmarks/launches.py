"""How many launches and synchronisations does a step of each optimizer take on an accelerator? Counted without one.

    python benchmarks/launches.py [--out benchmarks/records/launches.json]

Tensors say they are on "cuda:0" and count what is done with them, one launch for each operation
(`tests/devices/pretend.py`). The parameter lists are those of `optim_speed.py`; all roots are due at the same step. Run
it from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from kronscope.optim import SOAP, Every, KLShampoo, Shampoo
from tests.devices.pretend import Machine
from tests.devices.test_launches import LISTS, Counting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records/launches.json"))
    args = parser.parse_args()
    found = {}
    for name, shapes in LISTS.items():
        for kind in (Shampoo, SOAP, KLShampoo):
            with Machine() as machine:
                counting = Counting(machine, kind, shapes(), refresh=Every(2, spread=False))
                counting.step()
                plain, refresh = counting.step(), counting.step()
                found[f"{kind.__name__}, {name}"] = {"plain": plain, "refresh": refresh, "modes": counting.modes}
            print(f"{kind.__name__}, {name}: {plain}, {refresh}", flush=True)
    record = {"environment": {"torch": torch.__version__}, "launches and synchronisations": found}
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
