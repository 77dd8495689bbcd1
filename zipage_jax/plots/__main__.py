"""`python -m zipage_jax.plots FILE`: the README's figure, one compression of a request as the engine does it."""

import sys

from zipage_jax import LLM, CompressionConfig, SamplingParams
from zipage_jax.evictions import alive_positions
from zipage_jax.plots.pages import PageView, draw_pages
from zipage_jax.request import Status

WINDOW = 2


def first_compression() -> tuple[PageView, PageView]:
    """A request's pages in layer 0, head 0, full, and after its first compression (and its next token).

    Tiny model with random weights, pages of 4 entries, budget of 3 pages; another request runs beside it.
    """
    compression = CompressionConfig(budget_pages=3, window=WINDOW, record_evictions=True)
    sizes = {"page_size": 4, "num_pages": 24, "max_num_seqs": 2, "max_num_batched_tokens": 16, "dtype": "float32"}
    with LLM("tiny-llama", random_weights=True, compression=compression, **sizes) as llm:
        prompts = [{"prompt_token_ids": list(range(start, start + 6))} for start in (10, 30)]
        requests = llm.submit(prompts, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
        seq = requests[0].sequences[0]

        def view() -> PageView:
            alive = alive_positions(llm.engine.runner.cache, seq.page_ids, seq.cache_len)
            return PageView(tuple(seq.page_ids), alive[0, 0], llm.config.page_size)

        while not seq.num_evicted:
            if seq.page_ids:
                before = view()
            llm.engine.step()
        while seq.status is not Status.DECODE:
            llm.engine.step()
        after = view()
        llm.forget(requests)
        return before, after


def main(argv: list[str]) -> None:
    if len(argv) != 1:
        sys.exit("usage: python -m zipage_jax.plots FILE")
    draw_pages(*first_compression(), window=WINDOW).savefig(argv[0], dpi=120)


if __name__ == "__main__":
    main(sys.argv[1:])
