"""Worlds of ranks: process groups, decisions that all ranks take together."""
