"""Executables are traced and compiled once per shape, warmed up or met."""

import jax.numpy as jnp
import numpy as np

from zipage_jax.programs import Program, Programs


def test_warm_up_compiles_each_shape_once():
    traced = []

    def add(x, offset):
        traced.append(x.shape)
        return x + offset

    program = Program(add, donated=(), fixed=("offset",))
    programs = Programs("cpu")
    programs.warm_up([(program, (jnp.zeros(size), np.float32(i))) for i, size in enumerate((2, 3, 2, 2))])
    assert sorted(traced) == [(2,), (3,)]
    assert programs.num_compiled == 2
    np.testing.assert_array_equal(programs.run(program, jnp.ones(3), np.float32(4)), np.full(3, 5.0))
    programs.run(program, jnp.ones(4), np.float32(4))
    assert sorted(traced) == [(2,), (3,), (4,)]
