"""What saves say about their job."""

from planaria.core.job import JobConfig
from planaria.core.specs import NumSamples, Prepared
from planaria.job.save_facts import changed_data_text, save_facts


def test_a_job_that_goes_on_with_other_data_is_told_so() -> None:
    """The order of samples depends on their number. Older saves do not say it."""
    saved = save_facts(JobConfig(), Prepared(num_samples=NumSamples(500)))
    grown = Prepared(num_samples=NumSamples(501, 3))

    assert changed_data_text(saved, Prepared(num_samples=NumSamples(500, 3))) == ""
    assert changed_data_text({}, grown) == ""
    assert "have 501 samples, and had 500" in changed_data_text(saved, grown)
