"""``cosmos-app reward-service``: rewards over HTTP, of language models here, of others in wfm."""
