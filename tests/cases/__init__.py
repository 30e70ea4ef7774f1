"""Acceptance cases, one file per case: the id is in the names of the tests."""
