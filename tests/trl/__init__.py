"""Tests of the TRL integration: real TRL and real vLLM, each engine in a process of its own."""
