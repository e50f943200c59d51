"""What comes from others: files that run at every start of Python, what the locks pin, and whether an advisory speaks of it.

    python -m agentguard.supply check [--live]      # the locks against locks/advisories.json, or against osv.dev
    python -m agentguard.supply sbom FILE           # CycloneDX 1.6, from the locks
    python -m agentguard.supply hashes FILE         # the hashes beside the engine's lock, with those of a report of pip's

Standard library only, but for `packaging`'s comparison of versions, which pip brings along.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import site
import sys
import sysconfig
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentguard import __version__
from agentguard.errors import ConfigError

KNOWN_HOOKS = {
    # setuptools: lets it stand in for distutils; 151 bytes that have not changed since 2021
    "distutils-precedence.pth": "2f70c2fa9227e9db9348215d9c7b246d2786aac7516f86d71a5952c7c225aa16",
}
"""Files that run code at every start of Python and are meant to, by the SHA-256 of what they hold."""
_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;]+)\s*(?:;([^#]*?))?((?:\s+--hash=sha256:[0-9a-f]{64})*)\s*(?:#.*)?$")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
ENGINE, HASHES = "engine-cpu.txt", "engine-cpu.hashes.txt"
OSV = "https://api.osv.dev/v1/querybatch"


# -- what runs by itself -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hook:
    """A file that runs at every start of this Python. ``why``: what makes it unexpected, "" where it is not."""

    path: Path
    why: str


def packages_directories() -> list[Path]:
    """Where this Python looks for .pth files: its own site-packages, and the user's where it is used."""
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if site.ENABLE_USER_SITE:
        places.add(site.getusersitepackages())
    return sorted({Path(place) for place in places if Path(place).is_dir()})


def site_hooks(directories: Iterable[Path] | None = None) -> list[Hook]:
    """.pth files, sitecustomize and usercustomize. A .pth file that only names folders runs nothing; it is expected where it
    belongs to an installed package, as an editable install's does. One with a line of code only if `KNOWN_HOOKS` knows it."""
    places = packages_directories() if directories is None else list(directories)
    recorded = _recorded(places)
    found: list[Hook] = []
    for place in places:
        for path in sorted(place.glob("*.pth")):
            found.append(Hook(path, _why(path, recorded)))
        for name in ("sitecustomize", "usercustomize"):
            found += [Hook(path, "runs at every start, and no package of ours has one") for path in sorted(place.glob(f"{name}*"))]
    return found


def _why(path: Path, recorded: set[Path]) -> str:
    raw = path.read_bytes()
    # as site.py reads them: such a line is run, any other is a folder
    code = any(line.startswith((b"import ", b"import\t")) for line in raw.splitlines())
    if code:
        if KNOWN_HOOKS.get(path.name) == hashlib.sha256(raw.strip()).hexdigest():
            return ""
        return "runs code at every start, and is not one of those known"
    return "" if path in recorded else "belongs to no installed package"


def _recorded(places: Iterable[Path]) -> set[Path]:
    """The .pth files that installed packages list as theirs."""
    found: set[Path] = set()
    for place in places:
        for distribution in importlib.metadata.distributions(path=[str(place)]):
            found |= {place / file for file in distribution.files or () if file.suffix == ".pth" and len(file.parts) == 1}
    return found


# -- locks ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pin:
    """``marker``: for which Pythons; ``hashes``: SHA-256 of the files that may be installed."""

    name: str
    version: str
    marker: str = ""
    hashes: tuple[str, ...] = field(default=())


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> list[Pin]:
    """Raises ConfigError for a line that is no pin: a name without a version, a URL, an option."""
    pins: list[Pin] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _PIN.match(line.strip())
        if match is None:
            raise ConfigError(f"{path.name}:{number}", line[:80], "is no pin; write name==version, and hashes behind it")
        pins.append(Pin(match[1], match[2], (match[3] or "").strip(), tuple(_HASH.findall(match[4]))))
    return pins


def locks_directory() -> Path:
    here = Path(__file__).parent
    return next((d for d in (here / "_locks", here.parent / "locks") if d.is_dir()), here.parent / "locks")


def locks() -> dict[str, list[Pin]]:
    """The pins of every lock of this package, by its file's name."""
    found = {path.name: read_lock(path) for path in sorted(locks_directory().glob("*.txt")) if path.name != HASHES}
    beside = read_hashes(locks_directory() / HASHES)
    engine = [replace(pin, hashes=tuple(sorted(beside.get(f"{pin.name}=={pin.version}", pin.hashes)))) for pin in found[ENGINE]]
    return found | {ENGINE: engine}


# -- advisories ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advisory:
    """``ranges``: each from its first bad version ("0": the first of all) to the first good one ("" where there is none yet).
    ``versions``: single ones."""

    id: str
    package: str
    summary: str
    ranges: tuple[tuple[str, str], ...] = ()
    versions: tuple[str, ...] = ()

    def speaks_of(self, pin: Pin) -> bool:
        from packaging.version import Version

        if normal(pin.name) != normal(self.package):
            return False
        held = Version(pin.version)
        if any(held == Version(version) for version in self.versions):
            return True
        return any(Version(first) <= held and (not fixed or held < Version(fixed)) for first, fixed in self.ranges)


def read_advisories(path: Path | None = None) -> list[Advisory]:
    """The vendored list. Raises ConfigError for an entry that says nothing of any version."""
    path = path or locks_directory() / "advisories.json"
    found: list[Advisory] = []
    for row in json.loads(path.read_text())["advisories"]:
        ranges = tuple((first, fixed) for first, fixed in row.get("ranges", ()))
        advisory = Advisory(row["id"], row["package"], row["summary"], ranges, tuple(row.get("versions", ())))
        if not advisory.ranges and not advisory.versions:
            raise ConfigError(path.name, advisory.id, "names neither ranges nor versions")
        found.append(advisory)
    return found


def affected(pins: Mapping[str, Iterable[Pin]], advisories: Iterable[Advisory]) -> list[tuple[str, Pin, Advisory]]:
    """Which pin of which lock which advisory speaks of."""
    known = list(advisories)
    return [(lock, pin, a) for lock, held in pins.items() for pin in held for a in known if a.speaks_of(pin)]


def ask_osv(pins: Iterable[Pin]) -> dict[Pin, list[str]]:
    """Advisories of osv.dev, by pin. Raises ConfigError where it cannot be reached."""
    import urllib.error
    import urllib.request

    asked = sorted(set(pins), key=lambda pin: (pin.name, pin.version))
    queries = [{"package": {"name": normal(pin.name), "ecosystem": "PyPI"}, "version": pin.version} for pin in asked]
    request = urllib.request.Request(OSV, json.dumps({"queries": queries}).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310  # nosec B310  # a constant https address
            results = json.load(reply)["results"]
    except (urllib.error.URLError, TimeoutError, ValueError, KeyError) as error:
        raise ConfigError("osv.dev", OSV, f"cannot be asked ({error}); check against the vendored list, without --live") from None
    return {pin: [found["id"] for found in row.get("vulns", ())] for pin, row in zip(asked, results, strict=True)}


# -- bill of materials ---------------------------------------------------------------------------------------------------------


def sbom(pins: Mapping[str, Iterable[Pin]]) -> dict[str, Any]:
    """CycloneDX 1.6: every pinned package once, with the locks that pin it and their hashes. The same for the same locks."""
    components: dict[tuple[str, str], dict[str, Any]] = {}
    for lock, held in pins.items():
        for pin in held:
            purl = f"pkg:pypi/{normal(pin.name)}@{pin.version}"
            row = components.setdefault(
                (normal(pin.name), pin.version),
                {"type": "library", "bom-ref": purl, "name": pin.name, "version": pin.version, "purl": purl, "properties": []},
            )
            row["properties"].append({"name": "agentguard:lock", "value": lock})
            if pin.hashes:
                row["hashes"] = [{"alg": "SHA-256", "content": content} for content in sorted({*_contents(row), *pin.hashes})]
    rows = [components[key] for key in sorted(components)]
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    about = {"type": "application", "bom-ref": "agentguard-vllm", "name": "agentguard-vllm", "version": __version__}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {"component": about | {"licenses": [{"license": {"id": "Apache-2.0"}}]}},
        "components": rows,
        "dependencies": [{"ref": "agentguard-vllm", "dependsOn": [row["bom-ref"] for row in rows]}],
    }


def _contents(row: Mapping[str, Any]) -> Iterator[str]:
    return (held["content"] for held in row.get("hashes", ()))


# -- hashes --------------------------------------------------------------------------------------------------------------------


def read_hashes(path: Path) -> dict[str, set[str]]:
    """The hashes that stand beside the engine's lock, by name==version."""
    lines = [line.split() for line in path.read_text().splitlines() if line[:1] not in ("", "#")] if path.is_file() else []
    return {pin: {held.removeprefix("sha256:") for held in hashes} for pin, *hashes in lines}


def add_hashes(known: Mapping[str, set[str]], pins: Iterable[Pin], report: Mapping[str, Any]) -> dict[str, set[str]]:
    """With those of a report that `pip install --dry-run --ignore-installed --no-deps --report` wrote: reports of several Pythons
    add up, and what is pinned no longer is left out."""
    told: dict[tuple[str, str], str] = {}
    for item in report["install"]:
        held = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if held:
            told[normal(item["metadata"]["name"]), item["metadata"]["version"]] = held
    found: dict[str, set[str]] = {}
    for pin in pins:
        text = f"{pin.name}=={pin.version}"
        new = told.get((normal(pin.name), pin.version))
        hashes = set(known.get(text, ())) | ({new} if new else set())
        if hashes:
            found[text] = hashes
    return found


def written(hashes: Mapping[str, set[str]]) -> str:
    rows = [f"{pin} {' '.join(f'sha256:{held}' for held in sorted(hashes[pin]))}" for pin in sorted(hashes, key=str.lower)]
    return "\n".join(["# Made by agentguard.supply; see hashed.py.", *rows]) + "\n"


def main(arguments: list[str]) -> int:
    match arguments:
        case ["check"]:
            found = affected(locks(), read_advisories())
            for lock, pin, advisory in found:
                print(f"{lock}: {pin.name} {pin.version}: {advisory.id}: {advisory.summary}")
            print(
                f"{sum(map(len, locks().values()))} pins, {len(read_advisories())} advisories, {len(found)} found", file=sys.stderr
            )
            return 1 if found else 0
        case ["check", "--live"]:
            told = {pin: ids for pin, ids in ask_osv(pin for held in locks().values() for pin in held).items() if ids}
            for pin, ids in told.items():
                print(f"{pin.name} {pin.version}: {', '.join(ids)}")
            return 1 if told else 0
        case ["sbom", file]:
            Path(file).write_text(json.dumps(sbom(locks()), indent=1) + "\n")
            return 0
        case ["hashes", file]:
            pins = read_lock(locks_directory() / ENGINE)
            path = locks_directory() / HASHES
            path.write_text(written(add_hashes(read_hashes(path), pins, json.loads(Path(file).read_text()))))
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as failure:
        print(f"agentguard: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)
