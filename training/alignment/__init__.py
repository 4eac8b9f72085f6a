"""Alignment: tokens after a block learn to predict a target. One file per kind; alignment.py has the base."""

from training.alignment.alignment import Alignment
from training.alignment.repa import IREPA, REPA
from training.alignment.sra2 import SRA2
