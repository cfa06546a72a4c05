"""Triton's autotuner compiles its candidates one after another; here all at once before it times them, so that a first run takes a minute, not ten.
FEW_CANDIDATES=1 keeps two of them: enough for a check of results, not for times."""
import concurrent.futures
import os

from triton.runtime.autotuner import Autotuner

_pool = concurrent.futures.ThreadPoolExecutor(max(2, (os.cpu_count() or 4) - 2))
_prune = Autotuner.prune_configs


def _compile(tuner, args, kwargs, config):
    try:
        tuner.fn.run(*args, **{**kwargs, **config.all_kwargs(), "warmup": True})
    except Exception:
        pass  # the autotuner meets it again and leaves the candidate out


def _prune_after_compiling(self, kwargs, *more):
    configs = _prune(self, kwargs, *more)
    if os.environ.get("FEW_CANDIDATES"):
        configs = configs[:2]
    args = list(self.nargs.values())
    list(_pool.map(lambda c: _compile(self, args, kwargs, c), configs))
    return configs


Autotuner.prune_configs = _prune_after_compiling
