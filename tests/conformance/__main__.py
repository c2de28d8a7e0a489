"""``python -m conformance``: run the suite and print its table."""

import argparse
from importlib import import_module
from pathlib import Path

from conformance.features import FEATURES
from conformance.implementation import Implementation
from conformance.table import run, table, write

OWN = [
    "conformance.implementation:TorchHook",
    "conformance.implementation:TorchParametrization",
    "conformance.ours:Ours",
]


def implementation(path: str) -> Implementation:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument(
        "--implementation",
        nargs="+",
        default=OWN,
        metavar="MODULE:CLASS",
        help="what to run it on; by default torch's two and this library",
    )
    parser.add_argument(
        "--feature",
        nargs="+",
        choices=[feature.name for feature in FEATURES],
        metavar="NAME",
        help="only these features, by the names of their functions",
    )
    parser.add_argument("--why", action="store_true", help="also print what went wrong")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page")
    words = parser.parse_args()
    if words.write and words.feature:
        parser.error("--write puts down the whole table: leave --feature out")

    features = [f for f in FEATURES if words.feature is None or f.name in words.feature]
    tried = [implementation(path) for path in words.implementation]
    columns = {one.name: run(one, features) for one in tried}
    print(table(features, columns))
    if words.why:
        for name, misses in columns.items():
            for feature, missed in misses.items():
                for layer, error in missed.items():
                    print(f"\n{name}, {feature}, {layer}: {type(error).__name__}: {error}")
    if words.write:
        write(words.write, table(features, columns))


if __name__ == "__main__":
    main()
