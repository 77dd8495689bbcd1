# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3 · What is kept
#
# Which tokens survive compression, by layer and head, under different scoring policies. `record_evictions=True` lets the
# cache carry each entry's token position along; `generate_survivors` runs a request and looks at its pages before they are
# freed.

# %%
# %matplotlib inline
from IPython.display import HTML, display

from zipage_jax import LLM, CompressionConfig, SamplingParams
from zipage_jax.evictions import generate_survivors
from zipage_jax.plots import draw_survival, survival_html

PROMPT = (
    "Anna keeps a lighthouse. Her secret number is 7391. Every morning she climbs the stairs, cleans the lamp and writes "
    "the weather into her book. Every evening she lights the lamp and waits for the ships. One day"
)
params = SamplingParams(temperature=0.0, max_tokens=72, ignore_eos=True)


def survivors(policy):
    settings = CompressionConfig(budget_pages=4, policy=policy, record_evictions=True)
    sizes = {"page_size": 16, "num_pages": 16, "max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 128}
    with LLM("smollm2", compression=settings, **sizes) as llm:
        found = generate_survivors(llm, PROMPT, params)
        return found, [llm.get_tokenizer().decode([token]) for token in found.token_ids]


results = {policy: survivors(policy) for policy in ("zipage", "g-kv", "h2o")}

# %% [markdown]
# ## Heat maps
#
# A row is one kv head of one layer, a column one token; blue is alive. Vertical lines are tokens that most heads keep; the block
# at the right are the newest tokens. `h2o` gives those half of the budget, whatever they are; `zipage` and `g-kv` choose head
# by head, and drop keys that newer ones repeat.

# %%
num_tokens = len(results["zipage"][0].token_ids)
draw_survival({policy: found.alive for policy, (found, _) in results.items()}, num_tokens)

# %% [markdown]
# Averaged over pages of 16 tokens it shows how old the kept entries are:

# %%
draw_survival({policy: found.alive for policy, (found, _) in results.items()}, num_tokens, bin_size=16)

# %% [markdown]
# ## The text
#
# The darker a token, the more of the layers and heads still hold it. Is the secret number alive?

# %%
for policy, (found, tokens) in results.items():
    display(HTML(f"<b>{policy}</b>"), survival_html(tokens, found.alive))

# %% [markdown]
# ## How much heads agree
#
# The share of (layer, head) pairs that hold a token, for the prompt's tokens that live longest.

# %%
from zipage_jax.plots.survival import alive_share

found, tokens = results["zipage"]
share = alive_share(found.alive, len(tokens))
num_prompt = len(found.output.prompt_token_ids)
for position in sorted(range(num_prompt), key=lambda i: -share[i])[:10]:
    print(f"{share[position]:5.0%}  {position:3}  {tokens[position]!r}")
