"""The instructions that tiles use to multiply and add: one file per instruction set, and one for machines without such instructions."""
