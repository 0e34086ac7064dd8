"""Rotary embedding of heads, with the move from the projection's layout to that of attention."""
