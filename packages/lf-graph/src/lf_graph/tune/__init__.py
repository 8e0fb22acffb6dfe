"""Chooses launch configurations of the Triton kernels by measurement, after each proved right and repeatable."""
