-- Take or renew a lock.
-- KEYS: lock
-- ARGV: token milliseconds
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
-- DEL first: a full Redis refuses SET as a script's first write.
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
