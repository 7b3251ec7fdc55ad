#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Everything about this plugin that needs a Hopper card, in one run from the repository root. Expects wheels of
# importlib_metadata in .whl, of the FlashKDA release that works in .peer and of one that does not in .peer2.
set -u
PIP="python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade"
$PIP --target /tmp/site .whl/*.whl
cp -r plugins/fla-backend-flashkda /tmp/plug && ($PIP --no-build-isolation --target /tmp/site /tmp/plug || {
  cp -r plugins/fla-backend-flashkda/src/fla_backend_flashkda /tmp/site/; d=/tmp/site/fla_backend_flashkda-0.1.0.dev0.dist-info; mkdir -p $d
  printf 'Metadata-Version: 2.1\nName: fla-backend-flashkda\nVersion: 0.1.0.dev0\n' > $d/METADATA
  printf '[fla.backends]\nflashkda = fla_backend_flashkda.plugin\n' > $d/entry_points.txt; })
$PIP --target /tmp/k729 .peer/tokenspeed*.whl; $PIP --target /tmp/k810 .peer2/tokenspeed*.whl
R=$PWD; export PYTHONUNBUFFERED=1
export PYTHONPATH=/tmp/site:/tmp/k729:$R
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python3 -m fla backends list
echo "== bench"; timeout 100 python3 plugins/fla-backend-flashkda/benchmarks/overhead.py
echo "== probe time"; python3 - <<'P'
import time, torch
from fla_backend_flashkda.plugin import FlashKDA
torch.zeros(1, device="cuda"); import fla.ops.kda
s=time.time(); print(FlashKDA().probe(), "probe s", round(time.time()-s,3))
P
echo "== wheel 810"
PYTHONPATH=/tmp/site:/tmp/k810:$R timeout 100 python3 - <<'P'
import torch, json
from fla.backends import explain, last_decision, list_plugins, use_backend, BackendUnavailable
from fla.ops.kda import chunk_kda
import flash_kda; print(flash_kda.__file__)
q,k,v,g=(torch.randn(1,70,2,128,device="cuda").bfloat16() for _ in range(4)); b=torch.randn(1,70,2,device="cuda").bfloat16()
kw=dict(use_qk_l2norm_in_kernel=True,use_gate_in_kernel=True,use_beta_sigmoid_in_kernel=True,lower_bound=-5.0,A_log=torch.zeros(2,device="cuda"))
with torch.no_grad():
    o,_=chunk_kda(q,k,v,g,b,**kw); print("ran:", last_decision()); print("finite", o.isfinite().all().item())
    for r in last_decision().rejections: print("  ", r)
    print(explain(chunk_kda,q,k,v,g,b,**kw))
    try:
        with use_backend("flash_kda",strict=True): chunk_kda(q,k,v,g,b,**kw)
    except BackendUnavailable as e: print("strict:", e)
print(json.dumps(list_plugins(), default=str)[:700])
P
echo "== kit"; timeout 150 python3 -m pytest -p fla.testing.plugin -p no:cacheprovider --pyargs fla.testing.conformance --fla-backend flash_kda --fla-require --fla-report ${OUT:-.}/kit.json -q -x --maxfail=8 2>&1 | tail -60
echo "== gpu tests"; cd plugins/fla-backend-flashkda && timeout 60 python3 -m pytest -p no:cacheprovider -m gpu tests/test_gpu.py -q -k "not kit" 2>&1 | tail -15
