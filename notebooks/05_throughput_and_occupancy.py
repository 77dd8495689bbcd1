# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5 · Throughput and occupancy
#
# A fixed budget does not make a step faster: it lets more requests run at once. First the real scheduler against a cost
# model of a GPU, on the paper's workload; then an engine on this machine.
#
# ## Simulator
#
# The plans are the real scheduler's; only the time of each step comes from a cost model, so no device is needed. What is
# compared is scheduling; absolute numbers are the cost model's. Here a fifth of the problems of AMC 23, on the model of an
# A100 running Qwen3-8B.

# %%
# %matplotlib inline
from zipage_jax.bench.simulate import Options, run
from zipage_jax.plots import draw_curves, draw_steps

results, curves = run(Options(workload="amc", variants=("zipage", "no_async", "full_kv"), fraction=0.2))

# %%
for variant, result in results["amc"].items():
    speed, running, again = (result[name] for name in ("tokens_per_s", "mean_running", "preemptions"))
    print(f"{variant:10} {speed:7} tok/s, {running:6} requests at a time, {again} preemptions")
draw_curves(curves)

# %% [markdown]
# Under full KV long requests fill the pool: few run, others wait, and some are preempted and computed again. With a budget the
# memory of a request has a ceiling, so the number that runs is known in advance.
#
# `python -m zipage_jax.bench simulate --plot curves.png` replays all workloads and ablations.
#
# ## This machine
#
# The same pool of 24 pages, with and without a budget. Eight requests of 80 tokens grow to 5 pages each under full KV, so not
# all of them can finish side by side: some are preempted, and computed again later. With a budget of 2 pages (3 at most) all
# eight fit to their end.

# %%
from zipage_jax import LLM, CompressionConfig, SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
prompts = [{"prompt_token_ids": [1, *range(100 * i, 100 * i + 15)]} for i in range(1, 9)]
sizes = {"page_size": 16, "num_pages": 25, "max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 128}


def engine(compression):
    # Batch invariance means one shape for every step: little to compile, and every step costs the same.
    return LLM("smollm2", compression=compression, batch_invariant=True, enable_prefix_caching=False, **sizes)


def run_all(llm):
    llm.generate(prompts[:1], params, use_tqdm=False)  # compiles
    llm.metrics.recent.clear()
    outputs = llm.generate(prompts, params)
    records, samples = list(llm.metrics.recent), [output.outputs[0] for output in outputs]
    speed = sum(len(sample.token_ids) for sample in samples) / sum(record.total_s for record in records)
    preemptions = sum(sample.stats.num_preemptions for sample in samples)
    print(f"{speed:.0f} tok/s, {len(records)} steps, {preemptions} preemptions")
    return records, llm.metrics.num_pages


with engine(None) as llm:
    full_kv = run_all(llm)
with engine(CompressionConfig(budget_pages=2)) as llm:
    compressed = run_all(llm)

# %% [markdown]
# Full KV:

# %%
draw_steps(*full_kv)

# %% [markdown]
# With a budget of two pages:

# %%
draw_steps(*compressed)
