"""Probes of frozen features: blocks, whitening and head, chosen by left-out labelled examples."""
