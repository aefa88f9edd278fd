"""``cosmos-app reward-service``: scores of pictures and videos over HTTP, a process per reward."""
