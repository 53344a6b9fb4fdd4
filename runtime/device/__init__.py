"""The protocol that devices implement, and a folder for each kind of device."""
