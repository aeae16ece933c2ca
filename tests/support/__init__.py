"""Harness shared by all tests: scenarios run in forked ranks and compared bit for bit."""
