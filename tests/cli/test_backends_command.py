# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Iterator

import pytest

from fla.backends import BackendRegistry, BaseBackend, Capability, Rejection
from fla.cli._arguments import build_arguments, find_function, parse_shape, parse_values
from fla.cli._output import CliError


class Picky(BaseBackend):
    """Takes short calls only."""

    backend_type = "picky"
    env_var = "FLA_PICKY"
    priority = 2

    def chunk_kda_verifier(self, q, k, v, g, beta):
        if q.shape[1] > 100:
            return False, Rejection("slower", f"[slow] above 100 tokens, got {q.shape[1]}")
        return True, None

    def chunk_kda(self, q, k, v, g, beta):
        raise AssertionError("explain must not run anything")


class Hopper(BaseBackend):
    backend_type = "hopper"
    capability = Capability(device_types=("cuda",), compute_capability=(9, 0), dtypes=("bfloat16",))

    def chunk_kda(self, q, k, v, g, beta):
        raise AssertionError("explain must not run anything")


@pytest.fixture
def registered() -> Iterator[None]:
    registry = BackendRegistry("kda")
    registry.register(Picky())
    registry.register(Hopper())
    yield
    registry.unregister("picky")
    registry.unregister("hopper")


def verdicts(result) -> dict[str, tuple[str, str]]:
    return {v["backend"]: (v["code"], v["reason"]) for v in result.json["verdicts"]}


def test_list_without_plugins_says_so(fla_cli, monkeypatch):
    monkeypatch.setattr("fla.backends.list_plugins", list)
    result = fla_cli("backends", "list")
    assert result.code == 0
    assert "No plugins are installed" in result.out


def test_list_names_registered_backends_in_order(fla_cli, registered):
    rows = fla_cli("backends", "list", "--json").json["backends"]
    ours = [r for r in rows if r["backend"] in ("picky", "hopper")]
    assert [(r["operation"], r["backend"], r["functions"]) for r in ours] == [
        ("kda", "picky", ["chunk_kda"]),
        ("kda", "hopper", ["chunk_kda"]),
    ]
    others = fla_cli("backends", "list", "gla", "--json").json["backends"]
    assert not {"picky", "hopper"} & {r["backend"] for r in others}


def test_a_disabled_backend_is_listed_with_the_reason(fla_cli, registered, monkeypatch):
    monkeypatch.setenv("FLA_PICKY", "0")
    row = next(r for r in fla_cli("backends", "list", "--json").json["backends"] if r["backend"] == "picky")
    assert (row["usable"], row["code"]) == (False, "disabled")
    assert "FLA_PICKY" in row["reason"]


def test_explain_chooses_without_running(fla_cli, registered):
    result = fla_cli("backends", "explain", "kda.chunk_kda", "--shape", "B1,T64,H2,K64,V64", "--json")
    assert result.json["chosen"] == "picky"
    assert verdicts(result)["picky"][0] == "accepted"
    assert verdicts(result)["torch"][0] == "accepted"


def test_explain_gives_each_refusal_with_its_code(fla_cli, registered):
    words = ("backends", "explain", "chunk_kda", "--shape", "T128", "--device", "cpu")
    result = fla_cli(*words, "--json")
    assert result.json["chosen"] == "torch"
    assert verdicts(result)["picky"] == ("slower", "[slow] above 100 tokens, got 128")
    assert verdicts(result)["hopper"] == ("unsupported", "device is cpu, supported: cuda")
    assert "[slow] above 100 tokens, got 128" in fla_cli(*words).out


def test_explain_answers_for_a_device_that_is_not_here(fla_cli, registered):
    result = fla_cli("backends", "explain", "chunk_kda", "--device", "cuda", "--dtype", "float16", "--json")
    assert result.json["facts"]["device"].startswith("cuda")
    assert verdicts(result)["hopper"][0] == "unsupported"


def test_explain_under_a_pin_says_that_nothing_runs(fla_cli, registered):
    result = fla_cli("backends", "explain", "chunk_kda", "--device", "cpu", "--pin", "hopper")
    assert "chunk_kda -> nothing: hopper is pinned" in result.out


def test_explain_refuses_a_call_that_the_op_refuses(fla_cli):
    result = fla_cli("backends", "explain", "kda.chunk_kda", "--shape", "B1,T64,H3,HV4,K64,V64")
    assert result.code == 1
    assert "multiple of the number of query heads" in result.err


def test_explain_with_gradients_sees_a_backward(fla_cli):
    words = ("backends", "explain", "chunk_kda", "--json")
    assert fla_cli(*words, "--grad").json["facts"]["backward"] is True
    assert fla_cli(*words).json["facts"]["backward"] is False


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("nothing.chunk_kda",), 1, "no module fla.ops.nothing"),
        (("chunk_nothing",), 1, "no op is called 'chunk_nothing'"),
        (("kda.chunk_nothing",), 1, "has no function 'chunk_nothing'"),
        (("chunk_kda", "--shape", "B1,X2"), 2, "'X2' is not a size"),
        (("chunk_kda", "--shape", "B2,N3"), 2, "a packed call (N3) has B1, got B2"),
        (("chunk_kda", "--arg", "safe"), 2, "NAME=VALUE"),
        (("chunk_kda", "--arg", "save_gate=true"), 2, "no parameter 'save_gate'"),
        (("chunk_kda", "--dtype", "int8"), 2, "must be one of float16"),
        (("chunk_kda", "--device", "gpu9"), 2, "no torch device"),
    ],
)
def test_explain_refuses_bad_input_with_one_line(fla_cli, words, code, message):
    result = fla_cli("backends", "explain", *words)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert result.err.count("\n") == 1


def test_report_is_one_document(fla_cli, registered):
    report = fla_cli("backends", "report", "--json").json
    assert {"python", "torch", "settings", "plugins", "backends", "calls"} <= report.keys()
    assert "picky" in fla_cli("backends", "report").out


# The arguments of an asked-about call


def test_shapes_follow_the_sizes():
    function = find_function("kda.chunk_kda")
    sizes = parse_shape("B2 t10 H2 HV4 K8 V16")
    values = parse_values(["use_gate_in_kernel=true", "state_v_first=True", "scale=0.5"])
    made = build_arguments(
        function, "kda", sizes, dtype="float16", device="meta", values=values, tensors=["initial_state"], grad=True
    )
    shapes = {name: list(value.shape) for name, value in made.items() if hasattr(value, "shape")}
    assert shapes == {
        "q": [2, 10, 2, 8],
        "k": [2, 10, 2, 8],
        "v": [2, 10, 4, 16],
        "g": [2, 10, 4, 8],
        "beta": [2, 10, 4],
        "A_log": [4],
        "dt_bias": [32],
        "initial_state": [2, 4, 16, 8],
    }
    assert (made["scale"], made["use_gate_in_kernel"]) == (0.5, True)
    assert made["q"].requires_grad


def test_a_packed_call_gets_its_limits():
    made = build_arguments(
        find_function("chunk_kda"), "kda", parse_shape("N3"), dtype="float32", device="meta", values={}
    )
    assert list(made["cu_seqlens"].shape) == [4]
    assert not made["cu_seqlens"].is_floating_point()


def test_a_parameter_without_a_known_shape_is_asked_for():
    def op(q, strange):
        """An op of a plugin."""

    with pytest.raises(CliError, match="also needs strange"):
        build_arguments(op, "x", parse_shape(""), dtype="float32", device="meta", values={})


def test_a_value_is_a_literal_a_boolean_or_text():
    assert parse_values(["a=1", "b=-0.5", "c=TRUE", "d=none", "e=(1, 2)", "f=some text"]) == {
        "a": 1,
        "b": -0.5,
        "c": True,
        "d": None,
        "e": (1, 2),
        "f": "some text",
    }
