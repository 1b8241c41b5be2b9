"""Dense nearest-neighbour retrieval (CrIBo, section 4.1; Balazevic et al. 2023)."""
