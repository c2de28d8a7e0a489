"""``python -m conformance``: run the suite and print a table of the results."""

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
        help="implementations to test; default: torch's two and this library",
    )
    parser.add_argument(
        "--feature",
        nargs="+",
        choices=[feature.name for feature in FEATURES],
        metavar="NAME",
        help="test only these features, given by function name",
    )
    parser.add_argument("--errors", action="store_true", help="also print the errors")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table to this page")
    args = parser.parse_args()
    if args.write and args.feature:
        parser.error("--write needs every feature: leave out --feature")

    features = [f for f in FEATURES if args.feature is None or f.name in args.feature]
    tested = [implementation(path) for path in args.implementation]
    columns = {one.name: run(one, features) for one in tested}
    print(table(features, columns))
    if args.errors:
        for name, failures in columns.items():
            for feature, failed in failures.items():
                for layer, error in failed.items():
                    print(f"\n{name}, {feature}, {layer}: {type(error).__name__}: {error}")
    if args.write:
        write(args.write, table(features, columns))


if __name__ == "__main__":
    main()
