"""The rules Model Runner V2 is tried with; imports neither vLLM nor Triton, as those who run it and those who judge it both read
it."""

from __future__ import annotations

RULES = ("strict", "cactus:0.5", "lenience:0.4", "typical:eps=0.2,delta=0.5", "fuzzy:0.05", "r-fuzzy:0.3")
FILTERED = ("cactus:0.5,p_min=0.1,top_k=3", "interp:w=0.7,p_min=0.1,top_k=3")
