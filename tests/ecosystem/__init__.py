"""Trainers that people use, unchanged, with the plugin switched on by its variable alone."""
