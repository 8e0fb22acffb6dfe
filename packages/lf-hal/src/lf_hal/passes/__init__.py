"""Rewrites of graphs, each a pure function with a switch."""
