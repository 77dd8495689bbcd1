# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2 · Step by step
#
# What the engine does between two tokens, by hand: one prefill, some decode steps and one compression on explicit pytrees,
# with the pages drawn before and after, as in Figures 1 and 3 of the paper (arXiv 2603.08743). The model is a tiny one with
# random weights: where entries go does not depend on whether the text makes sense.

# %%
# %matplotlib inline
import functools

import jax
import numpy as np

import models
from zipage_jax.batches import compress_batch, decode_batch, prefill_batch
from zipage_jax.config import CompressionConfig, EngineConfig
from zipage_jax.evictions import alive_positions
from zipage_jax.memory_plan import MemoryPlan
from zipage_jax.plan import CompressJob, PrefillChunk
from zipage_jax.plots import PageView, draw_pages
from zipage_jax.request import SamplingParams, Sequence
from zipage_jax.runner import new_cache
from zipage_jax.seats import new_seats
from zipage_jax.steps import StepOptions, compress_step, decode_step, prefill_step

PAGE_SIZE, BUDGET_PAGES, WINDOW = 4, 3, 2
model = models.random_model("tiny-llama", "float32", seed=0)
compression = CompressionConfig(budget_pages=BUDGET_PAGES, window=WINDOW, layer_stride=2, record_evictions=True)
config = EngineConfig(page_size=PAGE_SIZE, max_num_seqs=2, dtype="float32", compression=compression)

# %% [markdown]
# ## The state on the device
#
# `CacheState` holds the pages of all layers (layer l of page p is at index l · num_pages + p), the queries of the
# observation window, the global scores, and here also each entry's token position. Steps take it and give it back.

# %%
memory = MemoryPlan(num_pages=12, num_slots=1, page_bytes=0, slot_bytes=0)
cache = new_cache(model.config, config, memory, model.params.embedding.dtype)
seats = new_seats(config.max_num_seqs)
jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", cache)

# %% [markdown]
# ## The page table on the host
#
# The host owns page ids. A request is a `Sequence`; its `page_ids` in time order are its page table. The scheduler would
# choose the pages; here we do. Page 0 is the null page, to which all padding points.

# %%
seq = Sequence("by hand", prompt_ids=list(range(20, 34)), params=SamplingParams(temperature=0.0))
seq.page_ids, seq.seat, seq.query_slot = [7, 2, 9, 4], 0, 1
seq.cache_len = seq.num_prompt
seq

# %% [markdown]
# ## Prefill
#
# One ragged batch: for every new token where its K and V go, and, in the last `window` tokens of a page, where its query is
# kept. The pages now hold the prompt's 14 positions.

# %%
pad = {"num_rows": 1, "max_pages": 4, "padding_seat": config.max_num_seqs}
batch = prefill_batch(
    [PrefillChunk(seq, start=0, length=14, samples=True)], num_tokens=16, page_size=PAGE_SIZE, window=WINDOW, **pad
)
static = {"model": model.config, "options": StepOptions()}
cache, seats, output = jax.jit(functools.partial(prefill_step, **static))(model.params, cache, seats, batch)
print("first token:", int(output.tokens[0]))


def view(layer: int = 0, head: int = 0) -> PageView:
    alive = alive_positions(cache, seq.page_ids, seq.cache_len)
    return PageView(tuple(seq.page_ids), alive[layer, head], PAGE_SIZE)


draw_pages(view())

# %% [markdown]
# ## Decode
#
# A decode step takes each row's last token from its seat on the device, writes one entry and draws the next token. After two
# of them the fourth page is full, and the request holds N_max = budget_pages + 1 pages: before its next token it must
# compress.

# %%
decode = jax.jit(functools.partial(decode_step, **static))
for _ in range(2):
    seq.all_ids.append(int(output.tokens[0]))
    seq.num_tokens += 1
    seq.cache_len += 1
    cache, seats, output = decode(model.params, cache, seats, decode_batch([seq], **pad))
before = {head: view(head=head) for head in range(2)}
draw_pages(before[0], window=WINDOW)

# %% [markdown]
# ## Compress
#
# Score, select, compact: each layer and head keeps its own 3 · 4 best entries, the window always among them, and moves them
# in time order into the first three pages. The host chose source and target pages from counts alone; it does not know, and
# need not know, which entries were kept.

# %%
job = CompressJob(
    seq,
    source_page_ids=tuple(seq.page_ids),
    target_page_ids=tuple(seq.page_ids[:BUDGET_PAGES]),
    budget_pages=BUDGET_PAGES,
    history_len=0,
    layers=(0, model.config.num_layers),
)
jobs = compress_batch([job], num_rows=1, num_pages=4, num_targets=BUDGET_PAGES, page_size=PAGE_SIZE)
compress = functools.partial(compress_step, config=compression, num_layers=model.config.num_layers)
cache = jax.jit(compress)(cache, jobs, np.int32(0))
seq.num_evicted += PAGE_SIZE
seq.cache_len -= PAGE_SIZE

# %% [markdown]
# Grey entries are gone, orange ones are the window whose queries scored the others. The fourth page is empty again and
# takes the next tokens.

# %%
draw_pages(before[0], view(head=0), window=WINDOW)

# %% [markdown]
# Another head of the same layer keeps other entries in the same pages:

# %%
draw_pages(before[1], view(head=1), window=WINDOW)

# %% [markdown]
# ## Decode on
#
# From here `cache_len` (entries held) and `position` (the RoPE position) differ: the next token is entry 12 and has
# position 16.

# %%
seq.all_ids.append(int(output.tokens[0]))
seq.num_tokens += 1
seq.cache_len += 1
cache, seats, output = decode(model.params, cache, seats, decode_batch([seq], **pad))
print(f"cache_len {seq.cache_len}, position {seq.position}")
draw_pages(view())
