"""What saves say about their job."""

from dataclasses import replace

from planaria.core.job import EvaluationConfig, JobConfig, ModelConfig
from planaria.core.specs import NumSamples, Prepared
from planaria.job.save_facts import changes_texts, save_facts


def test_a_job_that_goes_on_with_other_data_is_told_so() -> None:
    """The order of samples depends on their number. Older saves do not say it."""
    job = JobConfig()
    saved = save_facts(job, Prepared(num_samples=NumSamples(500)))
    grown = Prepared(num_samples=NumSamples(501, 3))

    assert changes_texts(saved, job, Prepared(num_samples=NumSamples(500, 3))) == ()
    assert changes_texts({}, job, grown) == ()
    (text,) = changes_texts(saved, job, grown)
    assert "have 501 samples, and had 500" in text


def test_a_job_that_goes_on_with_other_held_out_data_is_told_so() -> None:
    """If their losses may end training; they may have moved."""
    evaluation = EvaluationConfig(every=5, path="/one/easy.txt", patience=3)
    job = JobConfig(evaluation=evaluation)
    known = Prepared(num_samples=NumSamples(500, 40))
    saved = save_facts(job, known)

    moved = replace(job, evaluation=replace(evaluation, path="/other/easy.txt/"))
    assert changes_texts(saved, moved, known) == ()
    others = replace(evaluation, path="hard.txt")
    (text,) = changes_texts(saved, replace(job, evaluation=others), known)
    assert text.startswith("held-out data are hard.txt with 40 samples, and were easy.txt with 40 ")
    (text,) = changes_texts(saved, job, Prepared(num_samples=NumSamples(500, 39)))
    assert text.startswith("held-out data are easy.txt with 39 samples, and were easy.txt with 40 ")
    never = replace(job, evaluation=replace(others, patience=0))
    assert changes_texts(saved, never, known) == ()


def test_a_job_that_goes_on_with_another_model_of_the_same_shapes_is_told_so() -> None:
    """It went on in silence. Versions of libraries change no model, and code may only move."""
    before = {"rope": {"theta": 10_000.0}, "transformers_version": "5.0"}
    after = {"rope": {"theta": 500_000.0}, "transformers_version": "5.1"}
    job = JobConfig(model=ModelConfig(kind="python", target="models:small"))
    moved = JobConfig(model=ModelConfig(kind="python", target="moved:small"))
    saved = save_facts(job, Prepared(config=before))

    assert changes_texts(saved, job, Prepared(config=before)) == ()
    (text,) = changes_texts(saved, job, Prepared(config=after))
    assert text.endswith("rope.theta = 500000.0, and was 10000.0")
    (text,) = changes_texts(saved, moved, Prepared(config=before))
    assert text.startswith("model.target is 'moved:small', and was 'models:small'")
