# SPDX-License-Identifier: MIT
from __future__ import annotations

import sys
from pathlib import Path

import packaging.requirements
import packaging.specifiers  # noqa: F401
import pytest

from fla.cli import _installed


def install(folder: Path, name: str, version: str, *extra: str, direct_url: str | None = None) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *extra]))
    if direct_url:
        (info / "direct_url.json").write_text(direct_url)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty site folder, the only one on sys.path; `ours` is the running package inside it."""
    folder = tmp_path / "site"
    (folder / "fla").mkdir(parents=True)
    (folder / "fla" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(folder)])
    install(folder, "flash-linear-attention", "1.0.0")
    return folder


def look(*folders: Path) -> tuple[list[dict], list[str]]:
    installed = _installed.distributions([str(f) for f in folders])
    copies = _installed.other_copies(installed, folders[0] / "fla")
    return copies, _installed.conflicts(installed, copies)


def test_a_clean_install_has_no_conflicts(site):
    assert look(site) == ([], [])


def test_the_core_distribution_of_the_reference_beside_ours_is_named(site):
    install(site, "fla-core", "0.6.0")
    copies, found = look(site)
    assert [c["distribution"] for c in copies] == ["fla-core"]
    assert "fla-core 0.6.0" in found[0]
    assert "pip uninstall fla-core" in found[0]


def test_the_same_distribution_name_in_another_folder_is_named(site, tmp_path, monkeypatch):
    other = tmp_path / "other"
    (other / "fla").mkdir(parents=True)
    (other / "fla" / "__init__.py").write_text("")
    install(other, "flash_linear_attention", "0.6.0")
    monkeypatch.setattr(sys, "path", [str(site), str(other)])
    copies, found = look(site, other)
    assert [(c["version"], c["location"]) for c in copies] == [("0.6.0", str(other))]
    assert len(found) == 1


def test_a_folder_named_fla_without_metadata_is_named(site, tmp_path, monkeypatch):
    other = tmp_path / "work"
    (other / "fla").mkdir(parents=True)
    (other / "fla" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(other), str(site)])
    copies, found = look(site)
    assert copies == [{"distribution": None, "version": None, "location": str(other)}]
    assert "remove it from sys.path" in found[0]


def test_an_editable_install_of_the_running_folder_is_not_a_second_copy(site, tmp_path):
    elsewhere = tmp_path / "venv"
    url = f'{{"dir_info": {{"editable": true}}, "url": "{site.as_uri()}"}}'
    install(elsewhere, "flash-linear-attention", "1.0.0", direct_url=url)
    assert look(site, elsewhere)[0] == []


@pytest.mark.parametrize(
    ("name", "version", "complaint"),
    [
        ("torch", "2.6.0", "torch 2.6.0 is outside the supported range >=2.7"),
        ("torch", "2.11.0+cu130", None),
        ("triton", "3.2.0", "triton 3.2.0 is outside the supported range >=3.3,<3.10"),
        ("triton", "3.9.1", None),
        ("transformers", "4.44.2", "transformers 4.44.2 is outside the supported range >=4.45,<6"),
    ],
)
def test_versions_outside_the_range_are_named(site, name, version, complaint):
    install(site, name, version)
    assert look(site)[1] == ([complaint] if complaint else [])


def test_two_triton_flavours_together_are_named(site):
    install(site, "triton", "3.6.0")
    install(site, "triton-ascend", "3.6.0")
    assert "triton and triton-ascend are installed together" in look(site)[1][0]


def test_a_triton_that_torch_does_not_want_is_named(site):
    install(site, "torch", "2.11.0", 'Requires-Dist: triton==3.6.0; platform_system == "Linux"')
    install(site, "triton", "3.7.1")
    assert look(site)[1] == ["torch 2.11.0 wants triton==3.6.0, found 3.7.1"]
