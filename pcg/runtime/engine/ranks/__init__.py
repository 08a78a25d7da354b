"""An engine on threads over ranks: the first rank drives it, and the others follow."""
