"""The recipes that ship with agentguard: where they are, how one is named, and what is wrong with one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from agentguard import policy as policies
from agentguard.cautions import cautions
from agentguard.errors import ConfigError, nearest
from agentguard.policy import NOT_MEASURED, Policy


def folder() -> Path:
    """Inside the installed package, else in the source tree."""
    here = Path(__file__).parent
    return next((path for path in (here / "_recipes", here.parent / "recipes") if path.is_dir()), here / "_recipes")


def shipped() -> dict[str, Path]:
    """Recipes by name: the path below `folder` without its suffix. Other YAML there, for Docker or LiteLLM, is none."""
    found = {}
    root = folder()
    for path in sorted((*root.rglob("*.yaml"), *root.rglob("*.toml"))):
        name = path.relative_to(root).with_suffix("").as_posix()
        if not name.startswith("reference_pair/") and _is_recipe(path):
            found[name] = path
    return found


def _is_recipe(path: Path) -> bool:
    """Does it look like one? A recipe with an error in it is still to be found, so this asks for a key and validates nothing."""
    try:
        raw = policies.read(path)
    except ConfigError:
        return path.parent == folder()
    return "model" in raw and "services" not in raw


def named(text: str) -> Path:
    """The file of a recipe: a path, or the name of one that ships. Raises ConfigError with the nearest name."""
    path = Path(text)
    if path.is_file():
        return path
    recipes = shipped()
    if text in recipes:
        return recipes[text]
    if path.suffix in (".yaml", ".yml", ".toml") or text.count("/") > 1 or text.startswith(("/", ".", "~")):
        raise ConfigError("recipe", text, "cannot be read (No such file or directory); give the path of a YAML or TOML file")
    raise ConfigError("recipe", text, f"neither a file nor a recipe that ships; {nearest(text, recipes)}")


@dataclass(frozen=True, slots=True)
class Finding:
    """A recipe, its policy (None: it does not validate), what is wrong with it, and what to be careful about."""

    name: str
    path: Path
    policy: Policy | None
    error: str = ""
    warnings: list[str] = field(default_factory=list)


def check(name: str, path: Path) -> Finding:
    """Validate one. A shipped recipe that says not what was measured is warned of as any other is."""
    try:
        policy = policies.load(path)
    except ConfigError as error:
        return Finding(name, path, None, str(error))
    warnings = [caution.text for caution in cautions(policy)]
    if policy.about is None:
        warnings.append(f"about: says neither what it is for nor what was measured; add 'about.measured: {NOT_MEASURED}' at least")
    return Finding(name, path, policy, "", warnings)


def text_of(path: Path) -> str:
    """The file as it is written, comments and all. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("recipe", str(path), f"cannot be read ({error})") from None
