"""Optimizers: any on fp32 masters; by a rule, in one launch from a gradient's shard to masters, moments and codes."""
