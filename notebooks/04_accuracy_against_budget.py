# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4 · Accuracy against budget
#
# How far predictions move from full KV when entries are evicted. Teacher forcing: both see the same text, so the numbers are
# exact and need no task: the mean KL(full ‖ compressed) in nats a token, and how often both think the same token most likely.
#
# This run is tiny, to finish on two CPU cores. `python -m zipage_jax.evals policies` is the same measurement at full size;
# `benchmarks/policies.md` has recorded ones.

# %%
# %matplotlib inline
from zipage_jax.evals.policies import Arguments, measure, summarise, table
from zipage_jax.plots import draw_budgets

arguments = Arguments(
    policies=("zipage", "streaming-llm", "random"), budgets=(32, 64, 128), docs=3, tokens=32, one_width=True
)
cells, facts = measure(arguments)
facts

# %% [markdown]
# An asterisk marks a policy whose 95 % interval against `random` lies below 0 (paired by document).

# %%
from IPython.display import Markdown

rows = summarise(cells, seed=0)
Markdown(table(rows))

# %%
draw_budgets(rows)

# %% [markdown]
# With three documents the order of two good policies means nothing; that the curves fall with the budget, and that choosing
# beats guessing, does. Raise `docs` and `tokens` before you conclude more: the intervals in `rows` say when it is enough.

# %%
[(row["policy"], row["budget"], row.get("kl_minus_random")) for row in rows]
