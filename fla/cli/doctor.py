# SPDX-License-Identifier: MIT
"""`fla doctor`: what is installed, which devices there are, what will run on them, and why not."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import fla
from fla import settings
from fla.backends import devices
from fla.cli import _installed
from fla.cli._output import Output, add_json_option, print_json
from fla.cli.backends import op_modules, print_backends
from fla.cli.settings import print_settings

BROKEN = 1
NO_DEVICE = 3
_PLATFORMS = ("cuda", "rocm", "xpu", "npu", "cpu")
_ROOMS = ("fla.backends", "fla.ops", "fla.modules", "fla.layers", "fla.models")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--require", choices=_PLATFORMS, help="exit with 3 unless there is such a device")
    parser.add_argument(
        "--require-backend", metavar="NAME", action="append", default=[], help="exit with 1 unless NAME can be used"
    )
    parser.add_argument("--strict", action="store_true", help="treat warnings as failures")
    parser.add_argument("--show-env-vars", action="store_true", help="list every FLA_* setting, not only those set")
    add_json_option(parser)
    parser.epilog = (
        "Exit codes: 0 fla imports, 1 it does not or a required item fails, 3 the required device is absent."
    )


def run(args: argparse.Namespace) -> int:
    report = examine(args)
    if args.json:
        print_json(report)
    else:
        _print(report)
    return int(report["exit_code"])


def examine(args: argparse.Namespace) -> dict[str, Any]:
    """Everything the command knows, as one document; nothing is computed and no kernel is launched."""
    installed = _installed.distributions()
    ours = Path(fla.__file__).resolve().parent
    copies = _installed.other_copies(installed, ours)
    report: dict[str, Any] = {
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "os": platform.platform(),
            "machine": platform.machine(),
        },
        "fla": {"version": fla.__version__, "location": str(ours), "rooms": []},
        "distributions": _installed.versions(installed),
        "other_copies": copies,
        "torch": None,
        "triton": None,
        "devices": [],
        "nvcc": dict(zip(("path", "found_by"), devices.find_nvcc() or (None, None), strict=True)),
        "plugins": [],
        "backends": [],
        "settings": [],
        "unknown_settings": {},
        "problems": [],
        "warnings": _installed.conflicts(installed, copies),
        "hints": [],
    }
    problems: list[str] = report["problems"]
    _look_at_torch(report)
    report["fla"]["rooms"] = [_import(room) for room in _ROOMS]
    problems += [
        f"{room['module']} cannot be imported: {room['error']}" for room in report["fla"]["rooms"] if room["error"]
    ]
    _look_at_backends(report)
    _look_at_settings(report, everything=args.show_env_vars)
    report["hints"] = _hints(report)
    problems += _unmet_backends(report, args.require_backend)
    absent = args.require is not None and args.require not in {d["platform"] for d in report["devices"]}
    if absent:
        problems.append(f"no {args.require} device was found")
    report["ok"] = not problems and not (args.strict and report["warnings"])
    report["exit_code"] = NO_DEVICE if absent else 0 if report["ok"] else BROKEN
    return report


def _look_at_torch(report: dict[str, Any]) -> None:
    try:
        from fla.cli import _devices

        report["torch"] = _devices.torch_facts()
    except Exception as error:  # a torch that is missing or does not load is what this command is asked about
        report["problems"].append(f"torch cannot be imported: {_line(error)}")
        return
    report["devices"] = _devices.devices()
    report["triton"] = _devices.triton_facts()
    driver = report["triton"]["driver"]
    for device in report["devices"]:
        device["runs"], device["why"] = _runs(device, report["triton"], driver)


def _runs(device: dict[str, Any], triton: dict[str, Any], driver: str | None) -> tuple[str, str]:
    """Which core path the ops take on a device, and why."""
    if device["type"] == "cpu":
        return "torch", "Triton has no CPU driver; ops run their PyTorch path, kernels do not run"
    if triton["version"] is None:
        return "torch", f"triton cannot be imported ({triton['error']})"
    if driver is None or not devices.has_triton_driver(device["type"]):
        return "torch", f"triton {triton['version']} has no driver for it ({triton['error'] or f'driver: {driver}'})"
    return "triton", f"triton {triton['version']}, driver {driver}; ops without a Triton path run PyTorch"


def _look_at_backends(report: dict[str, Any]) -> None:
    try:
        from fla import backends

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it warns about stands in the report
            report["plugins"], report["backends"] = backends.list_plugins(), backends.list_backends()
    except Exception as error:  # without torch there are no ops, and that is reported already
        report["warnings"].append(f"backends cannot be listed: {_line(error)}")
        return
    for plugin in report["plugins"]:
        if plugin["error"]:
            where = f"{plugin['distribution']} {plugin['version']}"
            report["warnings"].append(f"plugin {plugin['name']} ({where}) is {plugin['state']}: {plugin['reason']}")


def _look_at_settings(report: dict[str, Any], *, everything: bool) -> None:
    report["unknown_settings"] = settings.unrecognised()
    report["warnings"] += report["unknown_settings"].values()
    report["settings"] = [row for row in settings.describe() if everything or row["origin"] != "default"]


def _unmet_backends(report: dict[str, Any], wanted: list[str]) -> list[str]:
    """A sentence for each wanted backend that no operation can use."""
    core = {"torch": report["torch"] is not None, "triton": bool(report["triton"] and report["triton"]["driver"])}
    unmet = []
    for name in wanted:
        rows = [row for row in report["backends"] if row["backend"] == name]
        if core.get(name) or any(row["usable"] for row in rows):
            continue
        reasons = dict.fromkeys(row["reason"] for row in rows)
        plugins = [p["reason"] for p in report["plugins"] if name in (p["name"], p["distribution"]) and p["reason"]]
        why = "; ".join([*reasons, *plugins]) or ("no driver" if name in core else "nothing registers it")
        unmet.append(f"backend {name} cannot be used: {why}")
    return unmet


def _import(room: str) -> dict[str, Any]:
    """Import a room with everything it offers; names are loaded on first use, so the room alone would prove little."""
    start = time.perf_counter()
    error, name = None, room
    try:
        modules = op_modules() if room == "fla.ops" else [room]
        for name in modules:
            module = importlib.import_module(name)
            for public in getattr(module, "__all__", ()):
                getattr(module, public)
    except (Exception, SystemExit) as caught:
        error = _line(caught) if name == room else f"{name}: {_line(caught)}"
    return {"module": room, "seconds": round(time.perf_counter() - start, 3), "error": error}


def _hints(report: dict[str, Any]) -> list[str]:
    """Known troubles of an environment like this one (docs/install.md says more about each)."""
    hints = []
    names = {row["name"]: row["version"] for row in report["distributions"] if row["version"]}
    accelerators = [d for d in report["devices"] if d["type"] != "cpu"]
    build = report["torch"] or {}
    if build and not accelerators:
        if build["cuda"] or build["hip"]:
            hints.append("torch is built for a GPU but sees none: check the driver (nvidia-smi, rocm-smi)")
        elif _installed.has_program("nvidia-smi"):
            hints.append("nvidia-smi is there but torch is a CPU build: reinstall torch from a CUDA index")
    if platform.system() == "Windows" and "triton-windows" not in names:
        hints.append("on Windows, Triton comes from the distribution triton-windows")
    if platform.machine() in ("aarch64", "arm64") and accelerators:
        hints.append("on ARM, Triton wheels come from third parties: install the one built for this torch release")
    if any(d.get("capability", "").startswith(("10.", "12.")) for d in accelerators):
        hints.append("some Triton kernels need a scratch allocator on Blackwell; use Triton 3.4 or newer")
    return hints


def _print(report: dict[str, Any]) -> None:
    out = Output()
    out.heading("Python")
    out.fields(report["python"].items())
    out.heading("fla")
    out.fields([("version", report["fla"]["version"]), ("location", report["fla"]["location"])])
    out.table(
        ["import", "status", "seconds", "error"],
        [
            [r["module"], "fail" if r["error"] else "ok", f"{r['seconds']:.2f}", r["error"]]
            for r in report["fla"]["rooms"]
        ],
    )
    out.heading("Distributions")
    out.table(
        ["name", "version", "supported"], [[d["name"], d["version"], d["wanted"]] for d in report["distributions"]]
    )
    out.heading("Devices, and what the ops run on them")
    if report["torch"]:
        build = {key: value for key, value in report["torch"].items() if value is not None}
        out.line("  torch " + ", ".join(f"{key} {value}" for key, value in build.items()))
    out.table(
        ["device", "name", "capability", "SMs", "memory GiB", "runs", "why"],
        [
            [
                d["type"] if d["index"] is None else f"{d['type']}:{d['index']}",
                *(d["name"], d.get("capability"), d.get("multiprocessors"), d.get("memory_gib"), d["runs"], d["why"]),
            ]
            for d in report["devices"]
        ],
    )
    nvcc = report["nvcc"]
    out.line(f"  nvcc: {nvcc['path']} (by {nvcc['found_by']})" if nvcc["path"] else "  nvcc: not found")
    out.heading("Backends")
    print_backends(out, report["plugins"], report["backends"])
    if report["settings"]:
        out.heading("Settings")
        print_settings(out, report["settings"], {})
    for title, style in (("problems", "bold red"), ("warnings", "yellow"), ("hints", None)):
        if report[title]:
            out.heading(title.capitalize())
            for text in report[title]:
                out.line(f"  {text}", style=style)
    out.line("\nNothing is wrong." if report["ok"] else "\nSomething is wrong, see above.")


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
