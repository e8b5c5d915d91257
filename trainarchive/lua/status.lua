-- Read a lane's state in one step. Writes nothing.
-- KEYS: meta frames offsets ctl
-- Answer: {epoch state opened last_append last_commit pending waiting} offsets control entries exists
local meta, frames, offsets, ctl = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
return {
  redis.call('HMGET', meta, 'epoch', 'state', 'opened', 'last_append', 'last_commit', 'pending', 'waiting'),
  redis.call('HGETALL', offsets),
  redis.call('HGETALL', ctl),
  redis.call('XLEN', frames),
  redis.call('EXISTS', frames),
}
