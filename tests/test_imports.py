"""Who may import whom: read from the source, so that a forbidden import fails before it is ever run."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
OWN = ("zipage_jax", "pallas_kernels", "models")
# module -> what it may import of the project; "*" is anything.
ALLOWED = {
    "zipage_jax.pages": set(),
    "zipage_jax.request": set(),
    "zipage_jax.scheduler": {"pages", "request", "config", "admission", "plan", "jobs", "prefixes", "slots"},
    "zipage_jax.state": set(),
    "zipage_jax.sampling": {"state"},
    "zipage_jax.text": set(),
    "zipage_jax.attention": {"state", "pallas_kernels"},
    "zipage_jax.compression": {"state", "config", "scoring", "pallas_kernels"},
    "zipage_jax.steps": {"state", "config", "attention", "compression", "sampling", "models"},
    "zipage_jax.batches": {"state", "request", "plan", "scheduler"},
}
NO_JAX = (
    "zipage_jax.pages",
    "zipage_jax.request",
    "zipage_jax.scheduler",
    "zipage_jax.plan",
    "zipage_jax.admission",
    "zipage_jax.jobs",
    "zipage_jax.prefixes",
    "zipage_jax.slots",
)


def imports_of(path: pathlib.Path) -> set[str]:
    """Full names of the modules that `path` imports, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module in OWN}
    return found


def modules(package: str):
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def test_kernels_and_models_stand_alone():
    for package in ("pallas_kernels", "models"):
        for name, path in modules(package):
            foreign = {m for m in imports_of(path) if m.split(".")[0] in OWN and m.split(".")[0] != package}
            assert not foreign, f"{name} imports {foreign}"


def test_layers_import_downwards_only():
    for name, path in modules("zipage_jax"):
        rule = next((v for k, v in ALLOWED.items() if name == k), None)
        if rule is None:
            continue
        for module in imports_of(path):
            top, *rest = module.split(".")
            if top not in OWN or (top == "zipage_jax" and not rest):
                continue
            target = rest[0] if top == "zipage_jax" else top
            assert target in rule, f"{name} must not import {module}"


def test_host_side_never_imports_jax():
    for name, path in modules("zipage_jax"):
        if name in NO_JAX:
            assert not {m for m in imports_of(path) if m.split(".")[0] in ("jax", "jaxlib", "flax")}, name


def test_jit_only_in_one_place():
    """One place compiles, so one place counts executables (checkpoint loading and benches excepted)."""
    for name, path in modules("zipage_jax"):
        if name == "zipage_jax.programs" or name.startswith(("zipage_jax.bench", "zipage_jax.evals")):
            continue
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute) and n.attr == "jit"]
        assert not calls, f"{name} calls jax.jit"
