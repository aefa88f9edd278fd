"""The two moments that must be atomic in Redis, as Lua: taking the controller's lease, committing.

A fencing token is a number that grows with every lease; it is also the epoch of commands. A commit
with an older token than the newest is refused, so a controller that was merely slow cannot write
over its successor.
"""

# KEYS lease token | ARGV owner ttl_ms -> {token, ""} or {0, owner that holds it}
# The same owner may come back at once: its launcher knows that the process before it is dead.
ACQUIRE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return {0, holder} end
local token = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {token, ''}
"""

# KEYS token lease sequence events log snapshot metrics payloads
# ARGV token owner ttl_ms sequence cursor entry snapshot kept_ms metrics_kept num_metrics
#      num_garbage, then the metrics, keys of payloads to delete, and for each command: stream,
#      field, value
# -> 'done', 'again' (this very commit was applied before: its answer got lost), 'fenced', or
#    'lost' (commits before it are gone, and the state with them, so that nobody goes on from less)
COMMIT = """
local token = redis.call('GET', KEYS[1])
local sequence = tonumber(redis.call('GET', KEYS[3]) or '0')
if token and token ~= ARGV[1] and tonumber(token) > tonumber(ARGV[1]) then return 'fenced' end
if sequence >= tonumber(ARGV[4]) then return 'again' end
if token ~= ARGV[1] or sequence < tonumber(ARGV[4]) - 1 then
  redis.call('UNLINK', KEYS[6])
  return 'lost'
end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('SET', KEYS[3], ARGV[4])
if ARGV[6] ~= '' then redis.call('XADD', KEYS[5], '*', 'b', ARGV[6]) end
if ARGV[7] ~= '' then
  redis.call('SET', KEYS[6], ARGV[7])
  redis.call('XTRIM', KEYS[5], 'MAXLEN', 0)
end
if ARGV[5] ~= '0-0' then
  redis.call('XTRIM', KEYS[4], 'MINID', ARGV[5])
  redis.call('XDEL', KEYS[4], ARGV[5])
end
local at = 12
for _ = 1, tonumber(ARGV[10]) do
  redis.call('XADD', KEYS[7], 'MAXLEN', '~', ARGV[9], '*', 'm', ARGV[at])
  at = at + 1
end
for _ = 1, tonumber(ARGV[11]) do
  redis.call('HDEL', KEYS[8], ARGV[at])
  at = at + 1
end
while at < #ARGV do
  redis.call('XADD', ARGV[at], '*', 'e', ARGV[1], ARGV[at + 1], ARGV[at + 2])
  redis.call('PEXPIRE', ARGV[at], ARGV[8])
  at = at + 3
end
for index = 1, 8 do
  if index ~= 2 then redis.call('PEXPIRE', KEYS[index], ARGV[8]) end
end
return 'done'
"""

# KEYS token payloads | ARGV token, then keys of payloads to delete -> 1, or 0 if fenced
# A controller that was merely slow must not judge what its successor has ordered.
SWEEP = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for at = 2, #ARGV do redis.call('HDEL', KEYS[2], ARGV[at]) end
return 1
"""
