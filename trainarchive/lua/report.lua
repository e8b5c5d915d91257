-- Replace a lane's report. A lane that is not known, or archived, stays as it is.
-- KEYS: meta
-- ARGV: report drained
local state = redis.call('HGET', KEYS[1], 'state')
if not state or state == 'archived' then return 0 end
if ARGV[2] == '1' then state = 'drained' end
redis.call('HSET', KEYS[1], 'report', ARGV[1], 'state', state)
return 1
