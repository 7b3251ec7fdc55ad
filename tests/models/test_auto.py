# SPDX-License-Identifier: MIT
"""What importing costs, and that the Auto classes know our models whatever is imported first."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


USE = """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    config = AutoConfig.for_model("kda", hidden_size=16, head_dim=8, num_heads=1, num_hidden_layers=1, vocab_size=11)
    names = [type(x).__name__ for x in (
        config, AutoModelForCausalLM.from_config(config), AutoModel.from_config(config))]
    import sys
    print(*names, any(type(f).__module__.startswith("fla.") for f in sys.meta_path))
"""


@pytest.mark.parametrize(
    "first",
    [
        "import fla",
        "import transformers; import fla",
        "from transformers import AutoModelForCausalLM; import fla",
        "import fla; import transformers.modeling_utils",
    ],
)
def test_auto_classes_in_either_order(first: str):
    # The last word says whether our finder is still there: it removes itself once it has done its work.
    assert python(first + "\n" + textwrap.dedent(USE)) == "KDAConfig KDAForCausalLM KDAModel False"


def test_import_is_light_and_quick():
    out = python(
        """
        import torch, sys, time
        start = time.perf_counter()
        import fla
        took = time.perf_counter() - start
        heavy = [m for m in ("transformers", "triton", "importlib_metadata", "fla.layers.kda", "fla.modules.norm",
                             "fla.models.decoder") if m in sys.modules]
        print(took < 0.3, heavy, fla.__version__ >= "0.2.2")
        """
    )
    assert out == "True [] True"


def test_import_does_not_need_torch_and_lists_what_there_is():
    out = python(
        """
        import sys, fla
        assert "torch" not in sys.modules
        assert not [n for n in fla.__all__ if n.endswith("Config")]
        assert "KimiDeltaAttention" in fla.__all__ and "KDAForCausalLM" in dir(fla)
        try:
            fla.no_such_name
        except AttributeError as error:
            print("no_such_name" in str(error))
        """
    )
    assert out == "True"


def test_names_of_the_package():
    import fla

    assert fla.KDAModel is fla.models.KDAModel
    assert fla.KimiDeltaAttention is fla.layers.KimiDeltaAttention
    assert fla.ops.kda.chunk_kda.__name__ == "chunk_kda"


def test_the_finder_leaves_no_trace_and_another_import_adds_none():
    out = python(
        """
        import sys, importlib, fla
        from fla.models import _auto
        ours = lambda: sum(isinstance(f, _auto._Finder) for f in sys.meta_path)
        assert ours() == 1
        _auto.install()
        assert ours() == 1
        from transformers.models.auto import configuration_auto, modeling_auto
        assert ours() == 0
        for module in (configuration_auto, modeling_auto):
            assert type(module.__spec__.loader).__module__.startswith("_frozen_importlib"), module.__spec__.loader
            assert module.__loader__ is module.__spec__.loader
        importlib.reload(configuration_auto)
        print("ok")
        """
    )
    assert out == "ok"


def test_changed_internals_of_transformers_are_a_warning():
    out = python(
        """
        import sys, types, warnings
        sys.modules["transformers.models.auto.configuration_auto"] = types.ModuleType("changed")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            import fla
        print([str(w.message).split("(")[0].strip() for w in seen])
        """
    )
    assert out.startswith("['fla could not register its models")


def test_module_paths_of_the_reference():
    import fla.models as models
    import fla.models.kda as kda
    import fla.models.kda.modeling_kda as modeling
    from fla.models.kda.configuration_kda import KDAConfig
    from fla.models.kda.modeling_kda import KDABlock, KDAForCausalLM, KDAPreTrainedModel

    assert modeling.KDAForCausalLM is models.KDAForCausalLM is kda.KDAForCausalLM is KDAForCausalLM
    assert KDAForCausalLM.config_class is KDAConfig is models.KDAConfig
    assert issubclass(KDAForCausalLM, KDAPreTrainedModel)
    assert KDABlock.__module__ == "fla.models.kda.modeling_kda"
    assert sorted(kda.__all__) == ["KDAConfig", "KDAForCausalLM", "KDAModel"]
    with pytest.raises(ImportError, match="KDAFoo"):
        from fla.models.kda import KDAFoo  # noqa: F401
