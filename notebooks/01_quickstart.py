# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1 · Quickstart
#
# Generate, chat and stream under a fixed KV budget, and read what it cost. The model is SmolLM2-135M-Instruct, which is
# installed with the development dependencies. On a CPU the first call of each kind compiles for some seconds.

# %%
from zipage_jax import LLM, CompressionConfig, SamplingParams

llm = LLM(
    "smollm2",
    page_size=16,
    num_pages=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=128,
    batch_invariant=True,
    compression=CompressionConfig(budget_pages=4),
)
llm

# %% [markdown]
# Pages hold 16 entries (cached tokens). A request that compresses keeps 4 pages and holds at most one more
# (N_max = 5), however long it gets. Sizes are small here, and batch invariance gives every kind of step one shape, so that a
# CPU has little to compile; for an 8B model on a GPU leave them out and take pages of 256 entries and budgets of 4 to 8.
#
# ## Generate

# %%
greedy = SamplingParams(temperature=0.0, max_tokens=88)
outputs = llm.generate(["The capital of France is", "Two plus two is"], greedy)
for output in outputs:
    print(repr(output.prompt), "->", output.outputs[0].text[:100])

# %% [markdown]
# ## Chat
#
# `chat` renders messages with the model's own template.

# %%
(answer,) = llm.chat([{"role": "user", "content": "Name three colours."}], greedy)
print(answer.outputs[0].text)

# %% [markdown]
# ## What it cost
#
# `length` counts prompt and output. Under full KV a request would hold `length / 16` pages; here it never held more than
# `peak_pages`. Evicted entries are counted for each layer and kv head, since every head chooses its own.

# %%
answer.outputs[0].stats

# %% [markdown]
# ## Stream
#
# `stream` yields the output so far whenever it grew. Leaving the loop early, or interrupting the cell, ends the request and
# frees its pages; the engine can be used on.

# %%
shown = 0
for output in llm.stream("Once upon a time", SamplingParams(temperature=0.0, max_tokens=40)):
    text = output.outputs[0].text
    print(text[shown:], end="", flush=True)
    shown = len(text)

# %% [markdown]
# ## Budgets of single requests
#
# `kv_budget` gives a request a budget of its own: a number of entries, a share of prompt + max_tokens, or `"full"`. The same
# prompt, side by side in one batch:

# %%
budgets = ["full", 48, 32]
params = [SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, kv_budget=budget) for budget in budgets]
outputs = llm.generate(["The history of lighthouses begins"] * len(budgets), params)
for budget, output in zip(budgets, outputs, strict=True):
    stats = output.outputs[0].stats
    print(f"kv_budget={budget!s:5} at most {stats.peak_pages:2} pages, {stats.num_compressions} compressions")

# %% [markdown]
# ## Statistics of the engine
#
# Totals since it was built; `llm.metrics.recent` has the last steps one by one (notebook 5 draws them).

# %%
llm.metrics

# %% [markdown]
# ## Hand the memory back
#
# `close`, or `with LLM(...) as llm:`, frees parameters and cache, so that the next cell can build another engine.

# %%
llm.close()
llm
