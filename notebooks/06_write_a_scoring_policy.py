# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6 · Write your own scoring policy
#
# A policy gives every entry a score; a compression keeps the highest. Sinks, the window, ties, moving entries, memory and
# scheduling are the same for all policies. `docs/scoring-policies.md` is the reference; this is the tour.
#
# ## A policy in ten lines
#
# Keys of small norm tend to receive much attention (arXiv 2406.11430), so keep those. `needs` says what is costly to provide:
# here the keys themselves.

# %%
# %matplotlib inline
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from zipage_jax import LLM, CompressionConfig, SamplingParams
from zipage_jax.evals.policies import Arguments, measure, summarise, table
from zipage_jax.evictions import generate_survivors
from zipage_jax.plots import draw_survival
from zipage_jax.scoring import PRESETS, Blend, KeepFirst, MaxNorm, Redundancy, ScoreContext, Scored, ScoringPolicy


@dataclass(frozen=True)
class KeyNorm(ScoringPolicy):
    """−‖k‖₂: keys of small norm are kept."""

    needs: ClassVar = frozenset({"entries"})

    def score(self, context: ScoreContext) -> Scored:
        return Scored(-jnp.linalg.norm(context.keys, axis=-1))


# %% [markdown]
# ## Combine it
#
# Policies nest: here the first four entries always stay, and an entry loses what newer keys repeat. Named in `PRESETS`, both
# can be used by name in configurations, evaluations and on the command line of this process.

# %%
PRESETS["key-norm"] = KeyNorm()
PRESETS["key-norm-diverse"] = KeepFirst(Blend(MaxNorm(KeyNorm()), MaxNorm(Redundancy()), 0.5), num=4)

# %% [markdown]
# ## See what it keeps
#
# A budget of 3 pages of 16 entries, on SmolLM2.

# %%
prompt = "The keeper of the lighthouse wrote every evening into her book: "
params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
sizes = {"page_size": 16, "num_pages": 16, "max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 128}
alive = {}
for policy in ("key-norm", "key-norm-diverse"):
    settings = CompressionConfig(budget_pages=3, policy=policy, record_evictions=True)
    with LLM("smollm2", compression=settings, **sizes) as llm:
        found = generate_survivors(llm, prompt, params)
        alive[policy] = found.alive
        print(policy, found.output.outputs[0].stats)
draw_survival(alive, len(found.token_ids))

# %% [markdown]
# ## Is it any good?
#
# The same text for all policies, against full KV. Small settings; notebook 4 says what the numbers are.

# %%
from IPython.display import Markdown

policies = ("key-norm", "key-norm-diverse", "zipage", "random")
cells, _ = measure(Arguments(policies=policies, budgets=(64,), docs=3, tokens=32))
Markdown(table(summarise(cells, seed=0)))

# %% [markdown]
# To keep a policy, give it a file in `zipage_jax/scoring/`, a line in `PRESETS`, and its NumPy form in
# `tests/reference/scores.py`: the tests then run the same contract on it as on every other.
