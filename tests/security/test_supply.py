"""Files that run by themselves, locks and their hashes, advisories, the bill of materials."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentguard import doctor, supply
from agentguard.errors import ConfigError
from agentguard.supply import Advisory, Pin

ROOT = Path(__file__).parents[2]


def test_this_python_starts_nothing_of_others() -> None:
    assert [hook for hook in supply.site_hooks() if hook.why] == []


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("evil.pth", "import os; os.system('true')\n", "runs code"),
        ("evil.pth", "/somewhere\nimport\tos\n", "runs code"),
        ("distutils-precedence.pth", "import os\n", "runs code"),
        ("paths.pth", "/somewhere\n", "belongs to no installed package"),
        ("sitecustomize.py", "", "runs at every start"),
        ("usercustomize.pyc", "", "runs at every start"),
        ("harmless.py", "import os\n", ""),
    ],
)
def test_a_file_that_starts_by_itself_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, named: str
) -> None:
    (tmp_path / name).write_text(text)
    bad = [hook for hook in supply.site_hooks([tmp_path]) if hook.why]
    assert [hook.path.name for hook in bad] == ([name] if named else [])
    monkeypatch.setattr(doctor, "site_hooks", lambda: supply.site_hooks([tmp_path]))
    check = doctor._start_up_files()
    assert check.ok == (not named)
    assert named in check.detail


def test_such_a_file_does_run(tmp_path: Path) -> None:
    """What the check is about: Python itself runs it, before any code of ours."""
    (tmp_path / "evil.pth").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    code = f"import site; site.addsitedir({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "ran").exists()


def test_an_editable_install_is_expected(tmp_path: Path) -> None:
    (tmp_path / "mine.pth").write_text("/somewhere\n")
    info = tmp_path / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: mine\nVersion: 1\n")
    (info / "RECORD").write_text("mine.pth,,\n")
    assert [hook.why for hook in supply.site_hooks([tmp_path])] == [""]


def test_every_pin_has_a_hash() -> None:
    """But torch, whose CPU build comes from another place on every machine."""
    for lock, pins in supply.locks().items():
        without = [pin.name for pin in pins if not pin.hashes]
        assert without == (["torch"] if lock == supply.ENGINE else []), f"{lock}: see locks/hashed.py for how hashes are made"


def test_pip_is_told_the_hashes() -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "locks/hashed.py"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    rest = subprocess.run(
        [sys.executable, ROOT / "locks/hashed.py", "--rest"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.partition("==")[0] for line in rest] == ["torch"]
    assert len(printed) + 1 == len(supply.locks()[supply.ENGINE])
    assert all(re.fullmatch(r"\S+==\S+( ; .+)?( --hash=sha256:[0-9a-f]{64})+", line) for line in printed)
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"--require-hashes --requirement \$\(VENV\)/hashed\.txt", makefile)


@pytest.mark.parametrize(
    "line", ["requests", "requests>=2", "-e .", "https://x/y.whl", "a==1 --index-url http://evil", "a==1 --hash=md5:0"]
)
def test_a_line_that_is_no_pin_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lock.txt"
    path.write_text(f"good==1\n{line}\n")
    with pytest.raises(ConfigError, match=r"lock.txt:2=.*is no pin"):
        supply.read_lock(path)


def test_no_advisory_speaks_of_the_locks() -> None:
    assert supply.affected(supply.locks(), supply.read_advisories()) == []


@pytest.mark.parametrize(
    ("pin", "found"),
    [
        (Pin("H11", "0.14.0"), "CVE-2025-43859"),
        (Pin("h11", "0.16.0"), ""),
        (Pin("litellm", "1.82.7"), "PYSEC-2026-2"),
        (Pin("litellm", "1.107.3"), "PYSEC-2026-2"),
        (Pin("litellm", "1.106.12"), ""),
        (Pin("python_multipart", "0.0.9"), "CVE-2024-53981"),
        (Pin("protobuf", "5.28.0"), "CVE-2025-4565"),
        (Pin("protobuf", "5.29.5"), ""),
        (Pin("ray", "99.0"), "CVE-2023-48022"),
        (Pin("torch", "2.5.1+cpu"), "CVE-2025-32434"),
    ],
)
def test_an_old_pin_would_be_found(pin: Pin, found: str) -> None:
    """Each row is a lock with one more line in it."""
    told = supply.affected({"lock": [pin]}, supply.read_advisories())
    assert [advisory.id for _, _, advisory in told] == ([found] if found else [])


def test_an_advisory_without_versions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "advisories.json"
    path.write_text(json.dumps({"advisories": [{"id": "X", "package": "p", "summary": "s"}]}))
    with pytest.raises(ConfigError, match="neither ranges nor versions"):
        supply.read_advisories(path)
    assert Advisory("X", "p", "s", versions=("1",)).speaks_of(Pin("P", "1.0"))


def test_the_live_list_says_so_where_it_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply, "OSV", "https://127.0.0.1:1/v1/querybatch")
    with pytest.raises(ConfigError, match=r"osv\.dev.*without --live"):
        supply.ask_osv([Pin("a", "1")])


def test_the_bill_of_materials_holds_every_pin_once(tmp_path: Path) -> None:
    file = tmp_path / "sbom.json"
    assert supply.main(["sbom", str(file)]) == 0
    bill = json.loads(file.read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    refs = [row["bom-ref"] for row in bill["components"]]
    pins = {(supply.normal(pin.name), pin.version) for held in supply.locks().values() for pin in held}
    assert sorted(refs) == sorted({f"pkg:pypi/{name}@{version}" for name, version in pins})
    assert bill["dependencies"][0]["dependsOn"] == refs
    hashed = [row for row in bill["components"] if row["name"] != "torch"]
    assert all(row["hashes"][0]["alg"] == "SHA-256" for row in hashed)
    assert json.loads(json.dumps(supply.sbom(supply.locks()))) == bill


def test_reports_of_pip_add_up() -> None:
    def report(digest: str) -> dict[str, object]:
        info = {"archive_info": {"hashes": {"sha256": digest}}}
        return {"install": [{"metadata": {"name": "A_b", "version": "1"}, "download_info": info}]}

    pins = [Pin("a-b", "1"), Pin("gone", "2")]
    once = supply.add_hashes({"old==1": {"x"}}, pins, report("aa"))
    assert supply.add_hashes(once, pins, report("bb")) == {"a-b==1": {"aa", "bb"}}
