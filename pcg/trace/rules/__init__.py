"""Rules by which ATen operators of an exported model become nodes of the flat graph.

A rule gets the flat graph and the FX node, adds nodes, and returns the node's flat value.
"""
