# SPDX-License-Identifier: MIT
"""Candidates, capabilities, verifiers: who is asked, in which order, with which reasons."""

from __future__ import annotations

import warnings

import pytest
import torch

from fla import settings
from fla.backends import (
    BackendRegistry,
    BaseBackend,
    Capability,
    DuplicateBackend,
    GluonBackend,
    Rejection,
    SignatureMismatch,
    TileLangBackend,
    TritonAscendBackend,
    devices,
    explain,
    last_decision,
    needs_backward,
    register,
    switches,
    use_backend,
)

from .conftest import make_toy


class Base(BaseBackend):
    def toy(self, q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
        return self.backend_type


def backend(name, base=Base, **attributes):
    return type(name, (base,), {"backend_type": name, **attributes})()


def rejections():
    return {v.backend: (v.code, v.reason) for v in last_decision().rejections}


def test_candidates_are_asked_by_priority_then_name(toy, qkv):
    fn, operation = toy
    asked = []

    def verifier(self, q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
        asked.append(self.backend_type)
        return False, "no"

    for name, priority in [("zeta", 1), ("beta", 5), ("alpha", 5), ("omega", 0)]:
        register(operation, backend(name, priority=priority, toy_verifier=verifier))
    fn(*qkv)
    assert asked == ["omega", "zeta", "alpha", "beta"]


def test_backend_without_the_function_is_passed_over(toy, qkv):
    fn, operation = toy
    register(operation, type("Else", (BaseBackend,), {"backend_type": "else", "other": lambda self, q: None})())
    assert fn(*qkv) == ("torch", 1.0)
    assert last_decision().rejections == ()


def test_no_verifier_accepts(toy, qkv):
    fn, operation = toy
    register(operation, backend("mine"))
    assert fn(*qkv) == "mine"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (True, None),
        ((True, None), None),
        ((False, "too long"), ("unsupported", "too long")),
        (False, ("unsupported", "its verifier gave no reason")),
        ((False, Rejection("slower", "core wins")), ("slower", "core wins")),
        (Rejection("unavailable", "no driver"), ("unavailable", "no driver")),
    ],
)
def test_answers_of_a_verifier(toy, qkv, answer, expected):
    fn, operation = toy
    register(operation, backend("mine", toy_verifier=lambda self, *a, **k: answer))
    for _ in range(2):  # the second time the answer is known
        result = fn(*qkv)
        assert result == ("mine" if expected is None else ("torch", 1.0))
        assert rejections() == ({} if expected is None else {"mine": expected})


def test_rejection_code_must_be_known():
    with pytest.raises(ValueError, match="unavailable, disabled, unsupported, slower, error"):
        Rejection("tired", "")


def test_verifier_is_asked_at_every_call_and_never_remembered(toy, qkv):
    fn, operation = toy
    limit = [4]
    register(
        operation,
        backend("mine", toy_verifier=lambda self, q, *a: (q.shape[1] <= limit[0], "too long")),
    )
    assert fn(*qkv) == "mine"
    limit[0] = 3
    assert fn(*qkv) == ("torch", 1.0)
    limit[0] = 4
    assert fn(*qkv) == "mine"


def test_exception_in_a_verifier_warns_once_with_traceback_and_is_skipped(toy, qkv):
    fn, operation = toy

    def buggy(self, q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
        return q.no_such_attribute, None

    register(operation, backend("buggy", toy_verifier=buggy))
    with pytest.warns(RuntimeWarning, match="no_such_attribute") as caught:
        assert fn(*qkv) == ("torch", 1.0)
    assert "Traceback" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fn(*qkv)
    code, reason = rejections()["buggy"]
    assert code == "error"
    assert "AttributeError" in reason


def test_verifier_whose_messages_differ_warns_once(toy, qkv):
    fn, operation = toy

    def buggy(self, q, *args):
        raise ValueError(f"boom {q.shape[1]}")

    register(operation, backend("buggy", toy_verifier=buggy))
    with pytest.warns(RuntimeWarning, match="boom"):
        fn(*qkv)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fn(*(torch.cat([x, x], 1) for x in qkv))
    assert f"boom {2 * qkv[0].shape[1]}" in rejections()["buggy"][1]


def test_answer_that_is_none_counts_as_a_bug_of_the_verifier(toy, qkv):
    fn, operation = toy
    register(operation, backend("mute", toy_verifier=lambda self, *a: None))
    with pytest.warns(RuntimeWarning, match="a verifier returns"):
        assert fn(*qkv) == ("torch", 1.0)


def test_strict_mode_raises_what_a_verifier_raises(toy, qkv, monkeypatch):
    fn, operation = toy

    def buggy(self, *args):
        raise LookupError("typo")

    register(operation, backend("buggy", toy_verifier=buggy))
    monkeypatch.setenv("FLA_BACKEND_STRICT", "1")
    with pytest.raises(LookupError, match="typo"):
        fn(*qkv)
    with settings.override(FLA_BACKEND_STRICT=False), pytest.warns(RuntimeWarning):
        assert fn(*qkv) == ("torch", 1.0)


# Signatures


@pytest.mark.parametrize("name", ["toy", "toy_verifier"])
def test_unknown_or_renamed_parameter_is_an_error_at_registration(toy, name):
    _, operation = toy

    def renamed(self, q, k, value, scale=1.0):
        return True, None

    with pytest.raises(SignatureMismatch, match="value"):
        register(operation, backend("mine", **{name: renamed}))
    assert not __import__("fla.backends", fromlist=["x"]).BackendRegistry(operation).backends


def test_missing_parameter_is_allowed_and_unsupported_where_a_call_gives_it(toy, qkv):
    fn, operation = toy
    register(operation, backend("old", toy=lambda self, q, k, v: "old"))
    assert fn(*qkv) == "old"
    assert fn(*qkv, 1.0, None, False) == "old"
    assert fn(*qkv, scale=2.0) == ("torch", 2.0)
    assert rejections() == {"old": ("unsupported", "it does not take scale")}
    fn(*qkv, cu_seqlens=torch.tensor([0, 4]))
    assert rejections() == {"old": ("unsupported", "it does not take cu_seqlens")}


def test_required_parameter_that_the_op_cannot_give_is_an_error(toy):
    with pytest.raises(SignatureMismatch):
        register(toy[1], backend("mine", toy=lambda self, q, k, v, more: None))


def test_verifier_without_implementation_is_an_error(toy):
    orphan = type("Orphan", (BaseBackend,), {"backend_type": "orphan", "toy_verifier": lambda self, q: True})
    with pytest.raises(SignatureMismatch, match=r"toy_verifier but no toy"):
        register(toy[1], orphan())


def test_signature_is_compared_when_the_op_comes_after_the_backend(qkv):
    register("later_op", backend("early", toy=lambda self, q, k, renamed: "early"))
    fn, _ = make_toy("later_op")
    with pytest.warns(RuntimeWarning, match="renamed"):
        assert fn(*qkv) == ("torch", 1.0)
    assert rejections()["early"][0] == "error"


# Duplicates


def test_same_type_twice_is_an_error_unless_one_overrides(toy, qkv):
    fn, operation = toy
    register(operation, backend("mine"))
    with pytest.raises(DuplicateBackend, match=r"'mine'.*override=True"):
        register(operation, backend("mine", toy=lambda self, q, k, v: "second"))
    assert fn(*qkv) == "mine"
    register(operation, backend("mine", toy=lambda self, q, k, v: "second"), override=True)
    assert fn(*qkv) == "second"
    register(operation, backend("mine", toy=lambda self, q, k, v: "third"))  # the one that overrides stays
    assert fn(*qkv) == "second"


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend_type": ""},
        {"backend_type": "triton"},
        {"priority": "high"},
        {"requires": None},
        {"requires": (3,)},
        {"env_var": 3},
        {"env_var": "FLA_PLUGINS"},
        {"capability": {"dtypes": ("float32",)}},
    ],
)
def test_backend_with_attributes_that_make_no_sense_is_refused(toy, qkv, wrong):
    fn, operation = toy
    with pytest.raises(TypeError, match=next(iter(wrong))):
        register(operation, type("Wrong", (Base,), {"backend_type": "ok", **wrong})())
    assert BackendRegistry(operation).backends == ()
    assert fn(*qkv) == ("torch", 1.0)


def test_capability_of_a_class_of_its_own_that_raises_costs_the_backend_and_not_the_call(toy, qkv, monkeypatch):
    fn, operation = toy

    class Broken(Capability):
        def check(self, facts):
            raise LookupError("typo")

    register(operation, backend("mine", capability=Broken()))
    assert fn(*qkv) == ("torch", 1.0)
    assert rejections()["mine"] == ("error", "its capability raised LookupError: typo")
    assert explain(fn, *qkv).verdict("mine").code == "error"
    monkeypatch.setenv("FLA_BACKEND_STRICT", "1")
    with pytest.raises(LookupError, match="typo"):
        fn(*qkv)


# Availability


def test_package_that_is_absent_makes_a_backend_unavailable(toy, qkv):
    fn, operation = toy
    register(operation, backend("mine", package_name="no_such_module_at_all"))
    assert fn(*qkv) == ("torch", 1.0)
    assert rejections() == {"mine": ("unavailable", "module no_such_module_at_all is not installed")}


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("torch>=1.0", None),
        ("torch<1.0", "torch<1.0 is needed, torch"),
        ("no-such-distribution>=2", "no-such-distribution>=2 is not installed"),
        ("no-such-distribution; python_version < '3'", None),
        ("not a requirement !!", "which is not a requirement"),
    ],
)
def test_requirements_are_compared_with_installed_versions(toy, qkv, requirement, expected):
    fn, operation = toy
    register(operation, backend("mine", requires=(requirement,)))
    assert fn(*qkv) == ("mine" if expected is None else ("torch", 1.0))
    if expected is not None:
        assert expected in rejections()["mine"][1]


@pytest.mark.parametrize(
    ("answer", "usable"),
    [(None, True), (True, True), (False, False), ((False, "wrong result"), False), (OSError("no kernel"), False)],
)
def test_probe_runs_once_before_the_first_use(toy, qkv, answer, usable):
    fn, operation = toy
    runs = []

    def probe(self):
        runs.append(1)
        if isinstance(answer, Exception):
            raise answer
        return answer

    register(operation, backend("mine", probe=probe))
    assert runs == []
    explain(fn, *qkv)
    assert runs == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [fn(*qkv, float(i)) for i in range(3)]
        fn(qkv[0].double(), qkv[1], qkv[2])
    assert runs == [1]
    assert results[0] == ("mine" if usable else ("torch", 0.0))
    if not usable:
        assert rejections()["mine"][0] == "unavailable"


def test_probe_is_not_run_where_the_capability_rules_the_backend_out(toy, qkv):
    fn, operation = toy
    register(
        operation,
        backend("mine", probe=lambda self: pytest.fail("probed"), capability=Capability(device_types=("cuda",))),
    )
    assert fn(*qkv) == ("torch", 1.0)


def test_probe_may_call_its_own_op(toy, qkv):
    fn, operation = toy

    def probe(self):
        with use_backend("mine", strict=True):
            return fn(*qkv) == "mine"

    register(operation, backend("mine", probe=probe))
    assert fn(*qkv) == "mine"


def test_ready_made_bases_say_what_they_need(toy, qkv, monkeypatch):
    fn, operation = toy
    monkeypatch.setattr(devices, "has_usable_nvcc", lambda: False)
    monkeypatch.setattr(switches.devices, "has_module", lambda name: name == "tilelang")
    register(operation, backend("tilelang", base=type("T", (TileLangBackend,), {"toy": Base.toy})))
    register(operation, backend("gluon", base=type("G", (GluonBackend,), {"toy": Base.toy})))
    register(operation, backend("triton_ascend", base=type("A", (TritonAscendBackend,), {"toy": Base.toy})))
    fn(*qkv)
    assert rejections()["tilelang"] == ("unavailable", "no usable nvcc (CUDA_HOME, PATH, nvidia-cuda-nvcc)")
    assert rejections()["gluon"] == ("disabled", "off by default; turn it on with FLA_GLUON=1")
    assert rejections()["triton_ascend"] == ("unavailable", "module torch_npu is not installed")


# Capabilities


@pytest.mark.parametrize(
    ("capability", "call", "reason"),
    [
        ({"device_types": ("cuda",)}, {}, "device is cpu, supported: cuda"),
        ({"compute_capability": (9, 0)}, {}, "device is cpu, needed: CUDA with compute capability 9.0"),
        ({"dtypes": ("bfloat16", "float16")}, {}, "q is float32, supported: bfloat16, float16"),
        ({"dtypes": (torch.float32,)}, {}, None),
        (
            {"head_dims": ((128, 128), (64, 64))},
            {},
            "head dimensions (K, V) are (8, 8), supported: (128, 128), (64, 64)",
        ),
        ({"head_dims": ((8, 8),)}, {}, None),
        ({"gva": False}, {}, None),
        ({"gva": False}, {"heads": 4}, "more value heads than key heads (GVA) is not supported"),
        ({"varlen": False}, {"cu_seqlens": torch.tensor([0, 4])}, "packed sequences (cu_seqlens) are not supported"),
        ({"varlen": True}, {"cu_seqlens": torch.tensor([0, 4])}, None),
        ({"state_layouts": ("k_first",)}, {"state_v_first": True}, "state layout is v_first, supported: k_first"),
        ({"state_layouts": ("v_first",)}, {"state_v_first": True}, None),
        ({"backward": False}, {"grad": True}, "a gradient is needed and only the forward is supported"),
        ({"backward": False}, {}, None),
        ({"backward": True}, {"grad": True}, None),
    ],
)
def test_capability_is_compared_with_the_call(toy, qkv, capability, call, reason):
    fn, operation = toy
    register(operation, backend("mine", capability=Capability(**capability)))
    q, k, v = qkv
    if call.pop("grad", False):
        k = k.clone().requires_grad_()
    if heads := call.pop("heads", None):
        v = torch.randn(1, 4, heads, 8)
    for _ in range(2):
        result = fn(q, k, v, **call)
        assert result == (("torch", 1.0) if reason else "mine")
        assert rejections() == ({"mine": ("unsupported", reason)} if reason else {})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("has_triton", [False, True])
def test_remembered_verdicts_equal_fresh_ones(driver, seed, has_triton):
    """Many calls of mixed signatures through one plan, each compared with explain, which remembers nothing."""
    import random

    choose = random.Random(seed)
    options = {"triton": "toy_triton_path:toy"} if has_triton else {}
    if has_triton and seed % 2:
        options["triton_capability"] = Capability(dtypes=("float32",), varlen=False)
    fn, operation = make_toy(**options)
    declared = {
        "device_types": [None, ("cuda",), ("cpu",)],
        "dtypes": [None, ("float32",), ("float16", "float64")],
        "head_dims": [None, ((8, 8), (4, 8)), ((128, 128),)],
        "gva": [None, False],
        "varlen": [None, False],
        "state_layouts": [None, ("k_first",), ("v_first",)],
        "backward": [None, False],
    }
    for number in range(choose.choice([1, 3])):
        stated = {name: choose.choice(values) for name, values in declared.items()}
        register(operation, backend(f"b{number}", capability=Capability(**stated) if number != 1 else None))
        if number == 1:
            BackendRegistry(operation).backends[1].verifier = lambda q, *a: (q.shape[1] > 5, "too short")
    for _ in range(150):
        K, V, heads, T = choose.choice([4, 8]), choose.choice([8, 16]), choose.choice([1, 2]), choose.choice([3, 7])
        dtype = choose.choice([torch.float32, torch.float16, torch.float64])
        q = torch.zeros(1, T, 2, K, dtype=dtype)
        k = torch.zeros(1, T, 2, K, dtype=choose.choice([dtype, torch.float32]))
        v = torch.zeros(1, T, 2 * heads, V, dtype=dtype, requires_grad=choose.random() < 0.5)
        call = {
            "cu_seqlens": choose.choice([None, torch.tensor([0, T])]),
            "state_v_first": choose.choice([False, True]),
        }
        with torch.set_grad_enabled(choose.random() < 0.7):
            result = fn(q, k, v, **call)
            found = explain(fn, q, k, v, **call)
        decision = last_decision()
        assert decision.backend == found.chosen
        assert (result if isinstance(result, str) else result[0]) == found.chosen
        fresh = {x.backend: x.code for x in found.verdicts}
        for verdict in decision.rejections:
            assert fresh[verdict.backend] == verdict.code


def test_gradient_is_not_needed_under_no_grad(toy, qkv):
    fn, operation = toy
    register(operation, backend("mine", capability=Capability(backward=False)))
    q, k, v = (x.requires_grad_() for x in qkv)
    assert fn(q, k, v) == ("torch", 1.0)
    with torch.no_grad():
        assert fn(q, k, v) == "mine"
    assert fn(q, k, v) == ("torch", 1.0)
    assert fn(q.detach(), k.detach(), v.detach()) == "mine"


def test_needs_backward_looks_into_nested_arguments():
    x = torch.zeros(2, requires_grad=True)
    assert needs_backward(x)
    assert needs_backward({"a": [None, (1, x)]})
    assert not needs_backward([x.detach(), 1, None])
    with torch.no_grad():
        assert not needs_backward(x)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtypes": "bfloat16"},
        {"state_layouts": ("KV",)},
        {"head_dims": ((1, 2, 3),)},
        {"head_dims": (128, 128)},
        {"compute_capability": 9},
        {"compute_capability": "9.0"},
        {"gva": "no"},
    ],
)
def test_capability_that_says_nothing_sensible_is_refused(wrong):
    with pytest.raises(ValueError, match="Capability"):
        Capability(**wrong)


def test_slower_is_overruled_by_a_pin_and_by_the_backends_own_variable(toy, qkv, monkeypatch):
    fn, operation = toy
    slow = Rejection("slower", "core is faster (H200, core 1.0)")
    register(operation, backend("mine", env_var="FLA_MINE", toy_verifier=lambda self, *a: (False, slow)))
    assert fn(*qkv) == ("torch", 1.0)
    assert rejections()["mine"][0] == "slower"
    with use_backend("mine"):
        assert fn(*qkv) == "mine"
    monkeypatch.setenv("FLA_MINE", "1")
    assert fn(*qkv) == "mine"
    assert explain(fn, *qkv).verdict("mine").accepted


def test_arguments_of_the_wrong_kind_reach_core_and_not_the_capability_code(toy):
    fn, operation = toy
    register(operation, backend("mine", capability=Capability(dtypes=("float32",), head_dims=((8, 8),))))
    assert fn("a", "b", "c") == "mine"  # nothing declared speaks against them


# The Triton path of core


def triton_toy(q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
    return ("triton", scale)


@pytest.fixture
def driver(monkeypatch):
    """A machine whose CPU tensors have a Triton driver."""
    monkeypatch.setattr(devices, "triton_possible", lambda: True)
    monkeypatch.setattr(devices, "has_triton_driver", lambda device_type: device_type == "cpu")
    import sys
    import types

    module = types.ModuleType("toy_triton_path")
    module.toy = triton_toy
    monkeypatch.setitem(sys.modules, "toy_triton_path", module)


def test_triton_path_serves_tensors_that_have_a_driver(driver, qkv):
    fn, operation = make_toy(triton="toy_triton_path:toy")
    for _ in range(2):
        assert fn(*qkv, scale=2.0) == ("triton", 2.0)
        assert last_decision().backend == "triton"
        assert last_decision().core
    with use_backend("torch"):
        assert fn(*qkv) == ("torch", 1.0)
    register(operation, backend("mine"))
    assert fn(*qkv) == "mine"


def test_triton_path_is_left_where_it_does_not_cover_the_call(driver, qkv):
    fn, _ = make_toy(
        triton="toy_triton_path:toy",
        triton_capability=Capability(dtypes=("float32",)),
        triton_verifier=lambda q, k, v, scale, cu_seqlens, state_v_first: (scale == 1.0, "scale must be 1"),
    )
    assert fn(*qkv) == ("triton", 1.0)
    assert fn(*qkv, 2.0) == ("torch", 2.0)
    assert rejections() == {"triton": ("unsupported", "scale must be 1")}
    assert fn(*(x.double() for x in qkv)) == ("torch", 1.0)
    assert rejections() == {"triton": ("unsupported", "q is float64, supported: float32")}


def test_triton_path_that_cannot_be_imported_leaves_the_torch_path(driver, qkv):
    fn, _ = make_toy(triton="no_such_module_here:toy")
    with pytest.warns(RuntimeWarning, match="no_such_module_here"):
        assert fn(*qkv) == ("torch", 1.0)
    assert explain(fn, *qkv).verdict("triton").code == "error"


def test_cpu_tensors_do_not_take_triton_by_themselves(qkv):
    fn, _ = make_toy(triton="toy_triton_path:toy")
    assert fn(*qkv) == ("torch", 1.0)
    assert explain(fn, *qkv).verdict("triton").code == "unavailable"
