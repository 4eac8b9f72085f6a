"""RFD4-Proteina: residues of a protein, with a representation of each pair of them."""

from routing.adapters.families.parts import Family

FAMILIES = {
    "RFD4ProteinaTransformer": Family(
        refused="between blocks all residues update those of pairs, by which blocks attend"
    ),
}
