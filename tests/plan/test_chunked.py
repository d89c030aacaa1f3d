"""Plans of trainings on chunks: what they can't do is refused, not left out."""

import numpy as np
import pytest

from farpipe.errors import InputError
from farpipe.plan.chunked import plan_on_chunks
from farpipe.spec import parse_job
from job_files import added


def test_a_context_degree_is_refused_where_each_device_has_whole_chunks():
    job = parse_job('[data]\npacking = "elastic"\n' + added("layout", "context = 2"))
    with pytest.raises(
        InputError, match=r"layout.context: 2, but with data.packing each device trains on whole chunks"
    ):
        plan_on_chunks(job, np.array([100, 200]), 200)
