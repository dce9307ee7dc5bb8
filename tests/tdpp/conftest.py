"""A folder for real runs, as the tests of launch have it."""

from tests.launch.conftest import runs  # noqa: F401  (a fixture)
