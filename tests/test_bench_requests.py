"""What the throughput bench asks for: the recorded workload, the paper's, and a user's file."""

import pytest

from zipage_jax.bench.__main__ import main
from zipage_jax.bench._requests import named_workload


def test_workload_w_is_the_recorded_one():
    workload = named_workload("W")
    assert workload.num_requests == 192
    assert set(workload.prompt_lens) == {128}
    assert sum(workload.output_lens) == 774_679


def test_samples_of_a_problem_share_their_prompt():
    workload = named_workload("longbench", 8)
    prompts = workload.prompts(1000)
    assert [len(prompt) for prompt in prompts] == list(workload.prompt_lens)
    assert prompts[0] == prompts[3] != prompts[4]
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)


def test_a_file_gives_exact_lengths_and_bad_lines_are_named(tmp_path):
    path = tmp_path / "lens.jsonl"
    path.write_text('{"prompt_len": 3, "output_len": 5}\n')
    assert named_workload(str(path)).output_lens == (5,)
    path.write_text('{"prompt_len": 3, "output_len": 5}\n{"prompt_len": 0, "output_len": 5}\n')
    with pytest.raises(ValueError, match=r"lens.jsonl:2: prompt_len=0"):
        named_workload(str(path))
    with pytest.raises(ValueError, match="neither one of"):
        named_workload("nothing")


def test_only_benches_are_offered():
    with pytest.raises(SystemExit, match=r"\{compression,decode,sampling,scheduler,simulate,throughput\}"):
        main(["trace"])
