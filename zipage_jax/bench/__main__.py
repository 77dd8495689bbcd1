"""`python -m zipage_jax.bench NAME [options]`: runs `main(argv)` of zipage_jax/bench/NAME.py."""

import importlib
import pkgutil
import sys

from zipage_jax import bench


def names() -> list[str]:
    """Modules of this package that are benches."""
    return sorted(module.name for module in pkgutil.iter_modules(bench.__path__) if not module.name.startswith("_"))


def main(argv: list[str]) -> None:
    if not argv or argv[0] not in names():
        sys.exit(f"usage: python -m zipage_jax.bench {{{','.join(names())}}} [options]")
    importlib.import_module(f"zipage_jax.bench.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
