"""Workers on other hosts, where one agent per host starts them and looks after them."""
