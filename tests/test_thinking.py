"""What is recorded of each step is what the network says after it."""

import numpy as np
import pytest
import torch

from evaluation.trace import record_trace
from models.carry import Prediction
from tests.tiny import FACTS, random_batch, tiny_model


@pytest.mark.parametrize("name", ["hrm", "trm", "urm", "serrm", "transformer"])
def test_trace_are_the_networks_outputs_after_each_step(name):
    model, batch = tiny_model(name).eval(), random_batch(3)
    trace = record_trace(model, batch)

    state = model.network.initial_state(3, seq_len=FACTS.seq_len)
    with torch.inference_mode():
        for step in range(model.eval_reasoning.max_steps):
            data = batch.inputs, batch.puzzle_identifiers
            state, prediction = model.network(state, *data, reasoning=model.eval_reasoning)
            assert isinstance(prediction, Prediction)
            probabilities = prediction.logits.double().softmax(-1).numpy()
            assert np.array_equal(trace.preds[:, step], prediction.logits.argmax(-1))
            np.testing.assert_allclose(trace.confidence[:, step], probabilities.max(-1), rtol=1e-5)
            assert np.array_equal(trace.q_halt[:, step], prediction.q_halt)
            assert np.array_equal(
                trace.wants_to_halt[:, step], model.network.wants_to_halt(state, prediction)
            )
    assert trace.preds.shape == (3, model.eval_reasoning.max_steps, FACTS.seq_len)


def test_a_run_stops_where_it_first_wants_to_and_else_after_the_last_step():
    model = tiny_model("trm").eval()
    trace = record_trace(model, random_batch(3))
    wants = np.array([[False, True, False, True], [False] * 4, [True] * 4])
    assert trace._replace(wants_to_halt=wants).halting_steps.tolist() == [2, 4, 1]
