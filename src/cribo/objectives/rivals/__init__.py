"""Objectives of other papers, for comparison with CrIBo (docs/objectives.md)."""
